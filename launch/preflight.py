"""`python -m launch preflight`: is this machine's installation whole? Loads no torch, reports every clash at once.

The packages have short names (`moe`, `mtp`, `hw`, ...) that other distributions use too; pip would lay a foreign `moe` over
ours without a word. So the seven roots must lie beside each other and hold our modules. Nothing of ours is imported here before that is
known: what `launch.host_check` needs for a cluster's hosts comes after.
"""

import importlib.util
import json
import platform
import sys
from importlib import metadata
from pathlib import Path

# root -> a file that tells ours from a foreign package of the same name
ROOTS = {
    "deepserve": "messages.py",
    "eplb": "config.py",
    "hw": "topology.py",
    "launch": "preflight.py",
    "mla": "config.py",
    "moe": "config.py",
    "mtp": "config.py",
}
REQUIRED = ("torch", "numpy", "msgspec", "pyzmq", "safetensors", "tokenizers", "fastapi", "uvicorn")
OPTIONAL = ("tokenspeed-flashmla", "tokenspeed-deepgemm", "tokenspeed-deepep", "nvidia-nvshmem-cu13", "torch-npu", "nixl")
MODEL_FILES = ("config.json", "tokenizer.json")
MIN_PYTHON = (3, 11)
HOME = Path(__file__).resolve().parents[1]


def package_folder(name: str) -> Path | None:
    """Where `import name` would find the package; None: nowhere. Imports nothing."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return Path(spec.submodule_search_locations[0]) if spec.submodule_search_locations else Path(spec.origin)


def root_clashes(home: Path, folders: dict[str, Path | None]) -> list[str]:
    """`folders`: where each root was found; `home`: the folder that should hold them all."""
    clashes = []
    for name, folder in folders.items():
        if folder is None:
            clashes.append(f"package {name} is not found; expected {home / name}")
        elif folder.resolve() != home / name:
            clashes.append(f"package {name} comes from {folder}, which shadows {home / name}")
        elif not (folder / ROOTS[name]).is_file():
            clashes.append(f"package {name} at {folder} is not ours: it has no {ROOTS[name]}")
    return clashes


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def model_clashes(folder: Path) -> list[str]:
    """A checkpoint folder needs a readable configuration, a tokenizer and at least one weight file."""
    if not folder.is_dir():
        return [f"model folder {folder} does not exist"]
    clashes = [f"model folder {folder} has no {name}" for name in MODEL_FILES if not (folder / name).is_file()]
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        clashes.append(f"model folder {folder} has no *.safetensors file")
    for path in [folder / name for name in MODEL_FILES if (folder / name).is_file()] + weights:
        try:
            with path.open("rb") as file:
                json.load(file) if path.suffix == ".json" else file.read(8)
        except (OSError, ValueError) as error:
            clashes.append(f"model file {path} cannot be read: {error}")
    return clashes


def installation() -> tuple[dict[str, str], list[str]]:
    """Prints what is installed; versions of what matters, and clashes."""
    versions = {name: version(name) for name in REQUIRED + OPTIONAL}
    print(f"python {platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}")
    print(f"packages in {HOME}")
    for name, found in versions.items():
        if found or name in REQUIRED:
            print(f"  {name:<22} {found or 'MISSING'}")
    clashes = [] if sys.version_info >= MIN_PYTHON else [f"Python {platform.python_version()} is older than 3.11"]
    clashes += root_clashes(HOME, {name: package_folder(name) for name in ROOTS})
    clashes += [f"library {name} is not installed" for name in REQUIRED if versions[name] is None]
    return {"python": platform.python_version()} | {name: found or "missing" for name, found in versions.items()}, clashes


def verdict(clashes: list[str]) -> int:
    """Prints every clash; returns the exit code."""
    for clash in clashes:
        print(f"CLASH: {clash}")
    print(f"{len(clashes)} clashes" if clashes else "all well")
    return 1 if clashes else 0


def preflight(model: Path | None = None) -> int:
    """Of this machine alone; returns the exit code. model: the shipped one unless given."""
    _, clashes = installation()
    model = model or HOME / "deepserve" / "models" / "deepserve-tiny"
    print(f"model in {model}")
    return verdict(clashes + model_clashes(model))
