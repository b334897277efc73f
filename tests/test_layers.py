"""The boundaries of docs/design.md section 2: import contracts, what may load torch, who may ask for the device, house limits.

The contracts themselves stand in pyproject.toml. Each is also shown to fail on a planted breach.
"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORTLINTER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
ROOTS = IMPORTLINTER["root_packages"]
CONTRACTS = {contract["id"]: contract for contract in IMPORTLINTER["contracts"]}
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70

# contract -> (file to write or extend, line to add, what the report must name)
BREACHES = {
    "layers": [
        ("mla/planted.py", "import deepserve.messages", "mla.planted -> deepserve.messages"),
        ("mla/planted.py", "from moe.config import MoEConfig", "mla.planted -> moe.config"),
        ("mtp/planted.py", "def late():\n    from mla import config", "mtp.planted -> mla.config"),
        ("eplb/planted.py", "import moe.config", "eplb.planted -> moe.config"),
        ("hw/cpu/planted.py", "import eplb.config", "hw.cpu.planted -> eplb.config"),
        ("deepserve/planted.py", "import launch", "deepserve.planted -> launch"),
    ],
    "hw-layers": [
        ("hw/topology.py", "import hw.select", "hw.topology -> hw.select"),
        ("hw/cpu/planted.py", "import hw.select", "hw.cpu.planted -> hw.select"),
        ("hw/planted.py", "", "hw.planted"),  # a new module must take a place among the layers
    ],
    "torch-free": [
        ("deepserve/engine/request.py", "import torch", "deepserve.engine.request -> torch"),
        ("deepserve/server/planted.py", "import hw.api", "deepserve.server.planted -> hw.api"),  # indirect
        ("hw/topology.py", "def late():\n    import torch.distributed", "hw.topology -> torch"),
        ("mla/planted.py", "import torch\nx = torch", "mla.planted -> torch"),
        ("launch/preflight.py", "from mla.planted import x", "launch.preflight -> mla.planted"),
    ],
    "backends": [("deepserve/planted.py", "from hw.cpu import backend", "deepserve.planted -> hw.cpu.backend")],
    "cuda-kernels": [
        ("moe/planted.py", "import deep_ep", "moe.planted -> deep_ep"),
        ("hw/cpu/planted.py", "import triton.language as tl", "hw.cpu.planted -> triton"),
    ],
    "transfer-library": [("hw/cuda/planted.py", "import nixl", "hw.cuda.planted -> nixl")],
    "ascend-kernels": [("hw/planted.py", "import torch_npu", "hw.planted -> torch_npu")],
    "web": [("deepserve/planted.py", "from fastapi import FastAPI", "deepserve.planted -> fastapi")],
}


def sources() -> list[Path]:
    return [path for root in ROOTS for path in sorted((ROOT / root).rglob("*.py"))]


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in sources()]


def lint(folder: Path) -> subprocess.CompletedProcess:
    """import-linter's command on `folder`; its packages come first on the path, so the installed ones are not looked at."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})  # it wraps names


def test_contracts_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_contract_has_a_breach():
    assert set(BREACHES) == set(CONTRACTS)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each contract about a copy of the tree with every breach, by its id."""
    folder = tmp_path_factory.mktemp("planted")
    for root in ROOTS:
        shutil.copytree(ROOT / root, folder / root, ignore=shutil.ignore_patterns("__pycache__", "models"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file, code, _ in chain(*BREACHES.values()):
        with (folder / file).open("a") as target:
            target.write(f"\n{code}\n")
    result = lint(folder)
    assert result.returncode != 0, result.stdout
    report = result.stdout.split("Broken contracts")[1]
    starts = {name: report.index(f"\n{contract['name']}\n") for name, contract in CONTRACTS.items()}
    ends = dict(zip(sorted(starts.values()), [*sorted(starts.values())[1:], len(report)], strict=True))
    return {name: report[start : ends[start]] for name, start in starts.items()}


@pytest.mark.parametrize(
    ("contract", "report"),
    [(contract, report) for contract, breaches in BREACHES.items() for _, _, report in breaches],
    ids=[f"{contract}-{number}" for contract, breaches in BREACHES.items() for number in range(len(breaches))],
)
def test_planted_breach_is_found(planted, contract, report):
    assert report in planted[contract]


def test_torch_free_modules_load_without_torch():
    """The contract sees import statements; this sees what really gets loaded, package `__init__` files included."""
    modules = []
    for name in CONTRACTS["torch-free"]["source_modules"]:
        path = ROOT / name.replace(".", "/")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        modules += [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    modules = [module for module in modules if not module.endswith(".__main__")]
    modules += ["deepserve.cli", "launch.worker"]  # they import torch inside functions that serving does not call
    program = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert set(modules) <= loaded
    assert not loaded & set(CONTRACTS["torch-free"]["forbidden_modules"])


def device_questions(tree: ast.Module) -> list[str]:
    """Places that ask which device they run on: device names as text, torch.cuda / torch.npu, .is_cuda, device.type."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split(":")[0] in ("cuda", "npu"):
            found.append(f"{node.lineno}: {node.value!r}")
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        on_torch = owner == "torch" and node.attr in ("cuda", "npu", "accelerator")
        if on_torch or node.attr in ("is_cuda", "is_npu") or (node.attr == "type" and "device" in owner):
            found.append(f"{node.lineno}: {owner}.{node.attr}")
    return found


def environment_reads(tree: ast.Module) -> list[str]:
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")]
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "os"]
    imported = [node for node in imported if {alias.name for alias in node.names} & {"environ", "getenv", "putenv"}]
    return [f"{node.lineno}: environment" for node in named + imported]


def globals_rebound(tree: ast.Module) -> list[str]:
    return [f"{node.lineno}: global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)]


def everywhere_but(rule, *allowed: str) -> list[str]:
    checked = [(path, tree) for path, tree in trees() if not str(path).startswith(allowed)]
    return [f"{path}:{place}" for path, tree in checked for place in rule(tree)]


def test_only_hw_asks_for_the_device():
    assert everywhere_but(device_questions, "hw/") == []


def test_environment_is_read_in_launch_and_cli_only():
    # DeepGEMM learns where it keeps its kernels in no other way, so one file writes the environment.
    assert everywhere_but(environment_reads, "launch/", "deepserve/cli.py", "hw/cuda/kernel_cache.py") == []


def test_no_module_state():
    assert everywhere_but(globals_rebound, "\0") == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (device_questions, 'x.to("cuda:0")'),
        (device_questions, "torch.cuda.synchronize()"),
        (device_questions, "if x.is_cuda: pass"),
        (device_questions, "if self.device.type == 'cpu': pass"),
        (environment_reads, "import os\nos.environ['A'] = '1'"),
        (environment_reads, "from os import getenv"),
        (globals_rebound, "def f():\n    global CURRENT\n    CURRENT = 1"),
    ],
)
def test_rules_find_what_they_forbid(rule, code):
    assert rule(ast.parse(code))


def test_files_and_functions_stay_short():
    long = [f"{path.relative_to(ROOT)}: {n} lines" for path in sources() if (n := len(path.read_text().splitlines())) > MAX_FILE_LINES]
    for path, tree in trees():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        spans = [(node, node.end_lineno - node.lineno + 1) for node in functions]
        long += [f"{path}:{node.lineno} {node.name}: {span} lines" for node, span in spans if span > MAX_FUNCTION_LINES]
    assert long == []
