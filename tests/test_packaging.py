"""What gets installed: the seven roots, every package and data file of them, and every library that they import."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOTS = ("deepserve", "eplb", "hw", "launch", "mla", "moe", "mtp")
# Libraries of an extra, by import name, and the one folder or file that may import them.
EXTRAS = {
    "hw/cuda": {"deep_ep", "deep_gemm", "flash_mla", "nvshmem", "triton"},
    "hw/ascend": {"torch_npu"},
    "hw/nixl_transfer.py": {"nixl"},
}
# Transitive dependencies that a declared library exposes as part of its own interface.
EXPOSED = {"starlette": "fastapi", "pydantic": "fastapi", "click": "typer"}


def files_of(root: str) -> list[Path]:
    return [path for path in sorted((ROOT / root).rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def test_package_list_equals_the_folders():
    folders = {path.parent.relative_to(ROOT) for root in ROOTS for path in files_of(root) if path.suffix == ".py"}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(".".join(folder.parts) for folder in folders)
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").exists()] == []


def test_the_seven_roots_lie_beside_each_other():
    program = f"import importlib.util as u\nfor n in {ROOTS}: print(u.find_spec(n).submodule_search_locations[0])"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [Path(line) for line in result.stdout.split()] == [ROOT / root for root in ROOTS]


def test_init_files_hold_nothing_but_words():
    """Importing a package costs nothing and pulls nothing in; `deepserve` alone names its public classes, loaded on first use."""
    for path in (path for root in ROOTS for path in files_of(root) if path.name == "__init__.py" and path.parent != ROOT / "deepserve"):
        body = ast.parse(path.read_text()).body
        assert body == [] or (len(body) == 1 and ast.get_docstring(ast.Module(body, []))), path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy to build from, so that the checkout gets no build folder. It bears the name that a clone has."""
    folder = tmp_path_factory.mktemp("home") / "deepserve"
    for root in ROOTS:
        shutil.copytree(ROOT / root, folder / root, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def built(how: str, source: Path, out: Path) -> zipfile.ZipFile:
    program = f"import sys; from setuptools import build_meta; print(build_meta.{how}(sys.argv[1]))"
    result = subprocess.run([sys.executable, "-c", program, str(out)], cwd=source, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> zipfile.ZipFile:
    return built("build_wheel", source, tmp_path_factory.mktemp("wheel"))


def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(source, tmp_path):
    built("build_editable", source, tmp_path).extractall(tmp_path / "site")
    program = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import deepserve; print(deepserve.__file__)"
    result = subprocess.run([sys.executable, "-S", "-c", program], cwd=source.parent, capture_output=True, text=True)
    assert result.stdout.strip() == str(source / "deepserve" / "__init__.py"), result.stderr


def test_wheel_holds_every_file(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {str(path.relative_to(ROOT)) for root in ROOTS for path in files_of(root)}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {Path(n).name for n in packed if "/models/deepserve-tiny/" in n}


def test_wheel_metadata_is_complete(wheel):
    folder = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    text = wheel.read(f"{folder}/METADATA").decode()
    fields = [line.partition(": ")[::2] for line in text.split("\n\n")[0].splitlines()]
    values = {name: [value for key, value in fields if key == name] for name, _ in fields}
    assert values["License-Expression"] == ["Apache-2.0"] and values["License-File"] == ["LICENSE"]
    assert values["Requires-Python"] == [">=3.11"]
    assert set(values["Provides-Extra"]) == {"cuda", "ascend", "pd", "test"}
    assert "deepserve = deepserve.__main__:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{folder}/licenses/LICENSE").decode()


def test_every_import_is_declared():
    """A library that only the tests install, or that comes along by chance, must not be imported by what users run."""
    declared = {normal(re.match(r"[\w.-]+", line)[0]) for line in PYPROJECT["project"]["dependencies"]}
    homes = metadata.packages_distributions()
    undeclared = []
    for path in (path for root in ROOTS for path in files_of(root) if path.suffix == ".py"):
        place = str(path.relative_to(ROOT))
        optional = {name for home, names in EXTRAS.items() if f"{place}/".startswith(f"{home}/") for name in names}
        for name in imported_names(ast.parse(path.read_text())) - set(sys.stdlib_module_names) - set(ROOTS) - optional:
            owners = {normal(home) for home in homes.get(name, [EXPOSED.get(name, name)])} | {EXPOSED.get(name)}
            if not owners & declared:
                undeclared.append(f"{place}: {name}")
    assert undeclared == []


def imported_names(tree: ast.Module) -> set[str]:
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.split(".")[0] for name in plain | froms}


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def torch_range(requirements: list[str]) -> SpecifierSet:
    return next(parsed.specifier for parsed in map(Requirement, requirements) if parsed.name == "torch")


def test_torch_range_admits_both_supported_releases():
    base = torch_range(PYPROJECT["project"]["dependencies"])
    assert [v for v in ("2.10.0", "2.11.0", "2.13.0", "2.14.0") if v in base] == ["2.11.0", "2.13.0"]
    assert "2.11.0" in torch_range(PYPROJECT["project"]["optional-dependencies"]["cuda"])
    assert "2.13.0" in torch_range(PYPROJECT["project"]["optional-dependencies"]["ascend"])
