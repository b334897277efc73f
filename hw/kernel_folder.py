"""The folder in which what was compiled at run time outlasts the process. Several processes may share it."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEFAULT_FOLDER = "~/.cache/deepserve/kernels"


def make_folder(folder: str | None) -> Path:
    """The folder, made if it is not there; None: the default. Raises OSError where it cannot be made."""
    path = Path(folder or DEFAULT_FOLDER).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the others wait, and then find what the first one compiled."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
