"""Expert-placement settings. Torch-free and without NumPy: frontends read them."""

import json
from dataclasses import dataclass, fields
from math import inf


@dataclass(frozen=True)
class EPLBConfig:
    """How many replicas an instance holds, where they start, and when they move. Raises ValueError with the offending value."""

    num_redundant_experts: int = 0  # copies beyond one of each logical expert, over all ranks
    load_profile: str | None = None  # file of loads that the initial placement is made for
    step_interval: int = 0  # steps between two looks at the load; 0: the placement stays as it starts
    window_size: int = 1000  # steps whose load counts
    tolerance: float = 0.002  # how far above the hottest rank of DeepSeek's algorithm a layer may stay
    hysteresis: float = 2.0  # a layer moves if the seconds it saves are above so many times those it costs
    step_budget_ms: float = 2.0  # most that moves may add to a step

    def __post_init__(self):
        for name, least in (("num_redundant_experts", 0), ("step_interval", 0), ("window_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("tolerance", "hysteresis", "step_budget_ms"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < inf:
                raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
        if self.step_budget_ms == 0:
            raise ValueError("step_budget_ms must be above 0, got 0: nothing could ever move")
        if self.load_profile is not None and not isinstance(self.load_profile, str):
            raise ValueError(f"load_profile must be the path of a file, got {self.load_profile!r}")

    @classmethod
    def parse(cls, text: str, **others: object) -> "EPLBConfig":
        """From a JSON object such as `{"window_size": 1000, "step_interval": 3000}`; `others` are fields that are set elsewhere."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"eplb_config must be a JSON object, got {text!r}: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"eplb_config must be a JSON object, got {text!r}")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"eplb_config has no field {name!r}; it takes {', '.join(known)}")
            if others.get(name):
                raise ValueError(f"{name} is {values[name]!r} in eplb_config and {others[name]!r} outside; give it once")
        return cls(**{**others, **values})
