"""From what a user calls a model to a folder on this machine."""

from pathlib import Path

import deepserve

SHIPPED_MODEL = "deepserve-tiny"
SHIPPED_FOLDER = Path(deepserve.__file__).parent / "models" / SHIPPED_MODEL

# Configs, tokenizer and chat template; `tokenizer.model` and remote code are never used.
_SMALL_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)


def resolve_model(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The folder of `name`: a folder that exists, the shipped model, or a hub id, which is downloaded unless cached.

    `with_weights` False fetches only the small files, for dummy weights. Raises ValueError with a sentence about `name`.
    """
    if not name:  # Path("") would be the working directory
        raise ValueError("model '' is not a folder on this machine")
    folder = Path(name).expanduser()
    if folder.is_dir() or name == SHIPPED_MODEL:
        if revision is not None:
            raise ValueError(f"revision {revision!r} is for models of the hub, {name!r} is a folder on this machine")
        return folder if folder.is_dir() else SHIPPED_FOLDER
    if name.startswith((".", "/", "~")) or folder.exists():
        raise ValueError(f"model {name!r} is not a folder on this machine")
    return _download(name, revision, with_weights)


def _download(name: str, revision: str | None, with_weights: bool) -> Path:
    import huggingface_hub  # slow to import, and most starts have a folder

    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if with_weights else ())]
    try:
        # The pattern to ignore keeps to the top folder: some repositories hold a second copy of the weights below it.
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # errors of whichever HTTP library the hub client uses are among them
        at = "" if revision is None else f" at revision {revision!r}"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"model {name!r} is neither a folder on this machine nor the shipped {SHIPPED_MODEL!r}, and fetching it{at} "
            f"from the Hugging Face hub failed: {reason}"
        ) from error
