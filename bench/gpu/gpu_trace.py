"""What a GPU did during a few steps, from a profiler's trace: busy time, time that it waited for the host, and each kernel's share."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Trace:
    """Averages over the traced steps, in milliseconds a step."""

    span_ms: float  # from the first kernel's start to the last one's end
    busy_ms: float  # at least one kernel or copy runs
    host_gap_ms: float  # nothing runs, and what comes next was launched by itself: not a pause between nodes of one graph
    kernels: list[tuple[str, float, float]]  # name, launches a step, milliseconds a step; largest first

    @property
    def host_gap_share(self) -> float:
        return self.host_gap_ms / self.span_ms

    def table(self, num: int) -> str:
        """The `num` largest kernels."""
        lines = [f"{ms * 1e3:10.1f} us {count:7.1f} x {ms * 1e3 / count:9.2f} us  {name[:100]}" for name, count, ms in self.kernels[:num]]
        return "\n".join(lines)


def trace(step: Callable[[], object], num_steps: int) -> Trace:
    """Run `step` `num_steps` times under the profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        prof.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summarize(events, num_steps)


def summarize(events: list[dict], num_steps: int) -> Trace:
    """Of chrome trace events. Nodes of one graph launch share a correlation id."""
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work.sort(key=lambda e: e["ts"])
    assert work, "the profiler saw no kernel"
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy = host_gap = 0.0
    end, launch = work[0]["ts"], None
    for event in work:
        total = totals[event["name"]]
        total[0] += 1
        total[1] += event["dur"]
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > end and event["args"].get("correlation") != launch:
            host_gap += start - end
        busy += max(0.0, stop - max(start, end))
        if stop >= end:
            end, launch = stop, event["args"].get("correlation")
    kernels = [(name, count / num_steps, us / 1e3 / num_steps) for name, (count, us) in totals.items()]
    kernels.sort(key=lambda kernel: -kernel[2])
    span = end - work[0]["ts"]
    return Trace(span / 1e3 / num_steps, busy / 1e3 / num_steps, host_gap / 1e3 / num_steps, kernels)
