"""How many tokens each expert got: a sliding window while serving, and profiles on disk. NumPy only."""

import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PHASES = ("prefill", "decode")
PROFILE_VERSION = 1
_PARTS = 16  # of a window: what it forgets at once


class LoadWindow:
    """Token counts of the last `size` steps, or up to a sixteenth more; prefill and decode apart."""

    def __init__(self, num_layers: int, num_logical: int, size: int):
        self.size, self.num_steps = size, 0
        self.total = np.zeros((len(PHASES), num_layers, num_logical), np.int64)
        self._parts: deque[tuple[int, np.ndarray]] = deque()

    def add(self, counts: np.ndarray, num_steps: int = 1) -> None:
        """counts `[phases, layers, num_logical]`: tokens that chose each expert in the `num_steps` steps since the last call."""
        assert counts.shape == self.total.shape and num_steps >= 1, f"{counts.shape} of {num_steps} steps, expected {self.total.shape}"
        self.total += counts
        self.num_steps += num_steps
        if self._parts and self._parts[-1][0] * _PARTS < self.size:
            steps, kept = self._parts.pop()
            self._parts.append((steps + num_steps, kept + counts))
        else:
            self._parts.append((num_steps, counts.astype(np.int64)))
        while self.num_steps - self._parts[0][0] >= self.size:
            steps, counts = self._parts.popleft()
            self.num_steps -= steps
            self.total -= counts

    def profile(self, layers: tuple[int, ...]) -> "LoadProfile":
        """What is in the window; `layers` are the model's numbers of the counted ones."""
        return LoadProfile(layers, self.num_steps, self.total.copy())


@dataclass(frozen=True)
class LoadProfile:
    """Loads of a model's MoE layers, as dumped by one instance and read by another."""

    layers: tuple[int, ...]  # numbers in the model, dense layers counted
    num_steps: int
    tokens: np.ndarray  # [phases, layers, num_logical] int64

    def load(self, phase: str | None = None) -> np.ndarray:
        """`[layers, num_logical]` tokens of one phase, or of both."""
        return self.tokens.sum(0) if phase is None else self.tokens[PHASES.index(phase)]

    def dump(self, path: Path) -> None:
        """Write a JSON file that `read` reads."""
        tokens = {phase: part.tolist() for phase, part in zip(PHASES, self.tokens, strict=True)}
        content = {"version": PROFILE_VERSION, "layers": self.layers, "num_steps": self.num_steps, "tokens": tokens}
        path.write_text(json.dumps(content))

    @classmethod
    def read(cls, path: Path, layers: tuple[int, ...], num_logical: int) -> "LoadProfile":
        """Of a model with these MoE layers, of which the profile may lack some. Raises ValueError if the file is not such a profile."""
        try:
            content = json.loads(path.read_text())
            version = content["version"]
            if version != PROFILE_VERSION:
                raise ValueError(f"load profile {path} has version {version!r}, expected {PROFILE_VERSION}")
            found = tuple(content["layers"])
            if not set(found) <= set(layers):
                raise ValueError(f"load profile {path} is of MoE layers {list(found)}, the model has {list(layers)}")
            tokens = np.array([content["tokens"][phase] for phase in PHASES])
            num_steps = int(content["num_steps"])
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"cannot read the load profile {path}: {error!r}") from None
        if tokens.shape != (len(PHASES), len(found), num_logical) or tokens.dtype != np.int64 or (tokens < 0).any():
            raise ValueError(f"load profile {path} must count {num_logical} experts in each of {len(found)} layers by whole numbers from 0")
        return cls(found, num_steps, tokens)
