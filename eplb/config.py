"""Expert-placement settings. Torch-free: frontends read them."""

from math import isfinite

import msgspec


class EPLBConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many replicas an instance holds, where they start, and when they move. Raises ValueError with the offending value."""

    num_redundant_experts: int = 0  # copies beyond one of each logical expert, over all ranks
    load_profile: str | None = None  # file of loads that the initial placement is made for
    dump_profile: str | None = None  # file that rank 0 writes the loads of the window to, at each look
    step_interval: int = 0  # steps between two looks at the load; 0: the placement stays as it starts
    window_size: int = 1000  # steps whose load counts
    tolerance: float = 0.002  # how far above the hottest rank of DeepSeek's algorithm a layer may stay
    hysteresis: float = 2.0  # a layer moves if the seconds it saves are above so many times those it costs
    step_budget_ms: float = 2.0  # most that moves may add to a step

    def __post_init__(self):
        for name, least in (("num_redundant_experts", 0), ("step_interval", 0), ("window_size", 1), ("tolerance", 0), ("hysteresis", 0)):
            value = getattr(self, name)
            if not (value >= least and isfinite(value)):
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not (self.step_budget_ms > 0 and isfinite(self.step_budget_ms)):
            raise ValueError(f"step_budget_ms must be above 0, got {self.step_budget_ms}")
        if self.dump_profile is not None and not self.step_interval:
            raise ValueError(f"dump_profile {self.dump_profile} needs a step_interval: loads are not counted without one")
