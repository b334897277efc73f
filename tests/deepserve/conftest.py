"""Fixtures of the serving system's tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deepserve.tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model("v3", seed=0)`: the folder of a tiny random model, made once per session. Do not write into it."""
    made: dict[tuple[str, int], Path] = {}

    def get(kind: str, seed: int = 0) -> Path:
        if (kind, seed) not in made:
            made[kind, seed] = make_tiny(kind, tmp_path_factory.mktemp(kind), seed)
        return made[kind, seed]

    return get
