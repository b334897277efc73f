"""Preflight on the real tree, and on trees that are broken in known ways."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.preflight import ROOTS, model_clashes, root_clashes

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "deepserve/models/deepserve-tiny"


RUN = """
import sys
from launch.__main__ import main
code = main(sys.argv[1:])
print("torch loaded" if "torch" in sys.modules else "torch-free")
sys.exit(code)
"""


def preflight(*arguments: str, first: Path | None = None) -> subprocess.CompletedProcess:
    """Run with `first` before everything else on the path, as a foreign package could lie."""
    path = os.pathsep.join(str(folder) for folder in (first, ROOT) if folder)
    command = [sys.executable, "-P", "-c", RUN, "preflight", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


def test_this_tree_is_whole():
    result = preflight()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all well" in result.stdout and "torch-free" in result.stdout
    assert f"python {sys.version_info.major}.{sys.version_info.minor}" in result.stdout


def test_command_line():
    result = subprocess.run([sys.executable, "-m", "launch", "preflight"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_clash_is_reported_at_once(tmp_path):
    for name in ("moe", "mtp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('a foreign package must not be run')")
    result = preflight("--model", str(tmp_path / "nowhere"), first=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    for name in ("moe", "mtp"):
        assert f"CLASH: package {name} comes from {tmp_path / name}, which shadows {ROOT / name}" in result.stdout
    assert f"CLASH: model folder {tmp_path / 'nowhere'} does not exist" in result.stdout
    assert "3 clashes" in result.stdout


def test_missing_and_overwritten_packages(tmp_path):
    for name in ROOTS:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "models"))
    (tmp_path / "moe/config.py").unlink()
    folders: dict[str, Path | None] = {name: tmp_path / name for name in ROOTS}
    folders["hw"] = None
    assert root_clashes(tmp_path, folders) == [
        f"package hw is not found; expected {tmp_path / 'hw'}",
        f"package moe at {tmp_path / 'moe'} is not ours: it has no config.py",
    ]


@pytest.mark.parametrize(
    ("damage", "clash"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no *.safetensors file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
    ],
)
def test_damaged_model_folder(tmp_path, damage, clash):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(MODEL / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 8)
    assert model_clashes(tmp_path) == []
    damage(tmp_path)
    clashes = model_clashes(tmp_path)
    assert len(clashes) == 1 and clash in clashes[0]
