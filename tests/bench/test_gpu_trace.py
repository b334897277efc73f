"""Reading a profiler's trace: what counts as waiting for the host."""

import pytest

from bench.gpu.gpu_trace import summarize


def event(name: str, start: float, duration: float, launch: int, cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "args": {"correlation": launch}}


def test_pauses_inside_a_graph_are_not_the_hosts():
    events = [
        event("copy", 0, 10, 1, "gpu_memcpy"),
        event("a", 12, 100, 2),  # 2 us after the copy, a launch of its own
        event("b", 115, 100, 2),  # 3 us later, in the same graph
        event("c", 150, 20, 2),  # meanwhile, on another stream
        event("a", 315, 85, 3),  # 100 us after the graph's end
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 0, "dur": 900, "args": {}},
    ]
    found = summarize(list(reversed(events)), 2)
    assert (found.span_ms, found.busy_ms, found.host_gap_ms) == pytest.approx((0.2, 0.1475, 0.051))
    assert found.host_gap_share == pytest.approx(0.255)
    assert found.kernels == [("a", 1.0, pytest.approx(0.0925)), ("b", 0.5, 0.05), ("c", 0.5, 0.01), ("copy", 0.5, 0.005)]


def test_a_long_kernel_hides_what_ends_before_it():
    found = summarize([event("long", 0, 100, 1), event("short", 10, 5, 2), event("next", 110, 10, 3)], 1)
    assert (found.busy_ms, found.host_gap_ms) == pytest.approx((0.11, 0.01))
