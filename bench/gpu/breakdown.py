"""Where a decode step's time goes: by stage within a step, and op by op alone.

In the step: one step without graphs, between events around each stage. The host is kept ahead by a kernel that sleeps before each
layer, so what lies between two events is device time. Alone: the same calls of one op, with the inputs and weights that they had in each
layer, one after the other in a graph of their own: what the kernels take without the step around them.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from deepserve.engine.engine import Engine
from hw.api import Ops
from moe.turns import Turns

STAGES = ("attention", "experts", "dense", "head", "sampling", "other")
SLEEP_CYCLES = 4_000_000  # about 2 ms: longer than the host takes to launch a layer
ASKED = ("decode_plan", "quantizes", "prefers_absorbed", "fuses_experts")  # they compute nothing
OPS = [name for name in vars(Ops) if not name.startswith("_") and name not in ASKED]


@dataclass
class Breakdown:
    """Milliseconds of one step."""

    stages: dict[str, float] = field(default_factory=dict)  # in the step
    alone: dict[tuple[str, str], float] = field(default_factory=dict)  # by (stage, op and shapes)

    @property
    def alone_ms(self) -> float:
        return sum(self.alone.values())

    def table(self) -> str:
        """Stages first, then ops from the largest down."""
        by_stage: dict[str, float] = defaultdict(float)
        for (stage, _), ms in self.alone.items():
            by_stage[stage] += ms
        lines = [f"{'stage':<14}{'in the step, ms':>18}{'ops alone, ms':>18}"]
        lines += [f"{stage:<14}{self.stages.get(stage, 0.0):>18.3f}{by_stage[stage]:>18.3f}" for stage in STAGES]
        lines.append(f"{'all':<14}{sum(self.stages.values()):>18.3f}{self.alone_ms:>18.3f}")
        lines += [f"  {ms:>10.3f} ms  {stage}: {op}" for (stage, op), ms in sorted(self.alone.items(), key=lambda item: -item[1])]
        return "\n".join(lines)


class _Recorder:
    """Stands between the layers and their ops for one step."""

    def __init__(self):
        self.stage, self.depth = "other", 0
        self.calls: dict[tuple[str, str], list[Callable[[], object]]] = defaultdict(list)
        self.spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []  # a stage's, or "layer"

    def op(self, name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            if self.depth == 0:
                key = self.stage, f"{name} {_shapes(args)}"
                self.calls[key].append(lambda: original(*args, **kwargs))
            self.depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1

        return call

    @contextmanager
    def _span(self, stage: str) -> Iterator[None]:
        """`stage` "layer": what its parts leave over is "other"."""
        if stage in ("layer", "head", "sampling"):
            torch.cuda._sleep(SLEEP_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before, self.stage = self.stage, "other" if stage == "layer" else stage
        start.record()
        yield
        end.record()
        self.stage = before
        self.spans.append((stage, start, end))

    def span(self, stage: str, original: Callable) -> Callable:
        """`original`, as a stage."""

        def call(*args, **kwargs):
            with self._span(stage):
                return original(*args, **kwargs)

        return call

    def turns(self, stage: str, original: Callable[..., Turns]) -> Callable[..., Turns]:
        """The same of a generator."""

        def call(*args, **kwargs):
            with self._span(stage):
                return (yield from original(*args, **kwargs))

        return call

    def stages(self) -> dict[str, float]:
        torch.cuda.synchronize()
        found: dict[str, float] = defaultdict(float)
        for stage, start, end in self.spans:
            found[stage] += start.elapsed_time(end)
        layers = found.pop("layer")
        found["other"] = layers - found["attention"] - found["experts"] - found["dense"]
        return dict(found)


def breakdown(engine: Engine, step: Callable[[], object]) -> Breakdown:
    """Of an engine that is decoding; `step` runs one step."""
    runner, model = engine.runner, engine.runner.model
    graphs, runner.graphs = runner.graphs, None
    try:
        step()  # whatever compiles or allocates first
        with _recording(engine) as recorder:
            step()
            torch.cuda.synchronize()
    finally:
        runner.graphs = graphs
    with torch.inference_mode():
        alone = {key: _time(calls) for key, calls in recorder.calls.items()}
    assert set(recorder.stages()) <= set(STAGES) and len(model.layers) == sum(stage == "layer" for stage, *_ in recorder.spans)
    return Breakdown(recorder.stages(), alone)


@contextmanager
def _recording(engine: Engine) -> Iterator[_Recorder]:
    """Methods of this engine's objects are replaced by recording ones, for a while."""
    recorder, model, backend = _Recorder(), engine.runner.model, engine.backend
    wrapped: list[tuple[object, str]] = []

    def wrap(owner: object, name: str, wrapper: Callable[[Callable], Callable]) -> None:
        setattr(owner, name, wrapper(getattr(owner, name)))
        wrapped.append((owner, name))

    for name in OPS:
        wrap(backend.ops, name, lambda original, name=name: recorder.op(name, original))
    for name in ("dispatch", "combine"):
        wrap(backend.expert_comm, name, lambda original, name=name: recorder.op(name, original))
    for layer in model.layers:
        wrap(layer, "turns", lambda original: recorder.turns("layer", original))
        wrap(layer.attention, "forward", lambda original: recorder.span("attention", original))
        if layer.moe is not None:
            wrap(layer.moe, "turns", lambda original: recorder.turns("experts", original))
        else:
            wrap(layer.dense, "forward", lambda original: recorder.span("dense", original))
    wrap(model, "logits", lambda original: recorder.span("head", original))
    wrap(engine.runner.sampler, "draw", lambda original: recorder.span("sampling", original))
    try:
        yield recorder
    finally:
        for owner, name in reversed(wrapped):
            delattr(owner, name)  # the class's own shows again


def _shapes(args: tuple) -> str:
    """Of the tensors among an op's arguments."""
    shapes = [tuple(arg.shape) for arg in args if hasattr(arg, "shape")]
    return ", ".join("x".join(map(str, shape)) for shape in shapes)


def _time(calls: list[Callable[[], object]]) -> float:
    """Milliseconds of all calls, one after the other in a graph; median of several replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])
