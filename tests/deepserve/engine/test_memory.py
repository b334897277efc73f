"""How many pages fit, and what is said when too few do."""

from pathlib import Path

import pytest

from deepserve.config import EngineArgs, EngineConfig
from deepserve.engine.memory import MemoryBudget, plan_memory
from deepserve.model.config import ModelConfig
from hw.api import MemoryInfo
from hw.cache_spec import CacheSpec, LayerCache, PagedEntry

MIB = 1 << 20
GIB = 1 << 30
MODEL = ModelConfig.from_folder(Path(__file__).parents[3] / "deepserve" / "models" / "deepserve-tiny")
# 1,024 bytes a token in each of two layers: a page of 64 tokens is 128 KiB.
SPEC = CacheSpec((LayerCache(paged=(PagedEntry("latent", (256,), "float32"),)),) * 2)
PAGE_BYTES = 128 << 10


class FakeRuntime:
    """A device of a size that the test chooses."""

    def __init__(self, free_bytes: int, cache_bytes: int | None = None):
        self.free_bytes, self.cache_bytes = free_bytes, cache_bytes

    def memory(self) -> MemoryInfo:
        return MemoryInfo(total_bytes=64 * GIB, free_bytes=self.free_bytes)

    def default_cache_bytes(self) -> int | None:
        return self.cache_bytes

    def num_sharing(self, num_ranks: int) -> int:
        return num_ranks


def budget_of(free_bytes: int = 32 * GIB, cache_bytes: int | None = None, **args) -> MemoryBudget:
    config = EngineConfig.resolve(EngineArgs(**args), "here", MODEL)
    return plan_memory(config, SPEC, FakeRuntime(free_bytes, cache_bytes), weight_bytes=7 * MIB)


def test_the_rest_is_pages():
    budget = budget_of(free_bytes=4 * GIB, memory_utilization=0.5)
    assert budget.page_bytes == PAGE_BYTES
    assert budget.limit_bytes == 2 * GIB - budget.workspace_bytes
    assert budget.num_pages == budget.limit_bytes // PAGE_BYTES
    assert (budget.total_bytes, budget.free_bytes, budget.weight_bytes) == (64 * GIB, 4 * GIB, 7 * MIB)


def test_workspace_grows_with_the_step():
    small, large = budget_of(max_num_batched_tokens=256), budget_of(max_num_batched_tokens=4096)
    assert 0 < small.workspace_bytes < large.workspace_bytes
    assert budget_of(max_num_seqs=4096).workspace_bytes > budget_of(max_num_seqs=256).workspace_bytes


def test_no_more_pages_than_all_sequences_can_fill():
    budget = budget_of(max_num_seqs=3, max_model_len=100)
    assert budget.num_pages == 3 * 2


def test_the_backend_limits_what_nobody_asked_for():
    assert budget_of(cache_bytes=GIB).num_pages == GIB // PAGE_BYTES
    asked = budget_of(cache_bytes=GIB, kv_cache_memory_bytes=2 * GIB)
    assert asked.num_pages == 2 * GIB // PAGE_BYTES


def test_a_number_of_pages_is_taken_as_it_is():
    assert budget_of(num_pages=3, max_model_len=4096).num_pages == 3  # requests are then limited by the pages
    assert budget_of(num_pages=3, kv_cache_memory_bytes=GIB).num_pages == 3


def test_exactly_one_sequence_fits():
    assert budget_of(max_model_len=640, kv_cache_memory_bytes=10 * PAGE_BYTES).num_pages == 10


@pytest.mark.parametrize("args", [{"kv_cache_memory_bytes": 10 * PAGE_BYTES - 1}, {"free_bytes": 300 * MIB, "memory_utilization": 0.01}])
def test_a_shortfall_is_refused_with_the_table(args):
    with pytest.raises(ValueError) as caught:
        budget_of(max_model_len=640, **args)
    text = str(caught.value)
    num_pages = 9 if "kv_cache_memory_bytes" in args else 0
    assert f"{num_pages} pages fit, but one sequence of max_model_len 640 tokens needs 10" in text
    assert "lower max_model_len or raise kv_cache_memory_bytes" in text
    lines = {line[:22].strip(): line[22:].strip() for line in text.splitlines()[1:]}
    assert lines["device memory"] == "65,536.00 MiB" and lines["weights"] == "7.00 MiB"
    assert lines["one page"] == "0.12 MiB" and lines["number of pages"] == str(num_pages)
    assert {"free after weights", "workspace", "limit for pages", "pages"} <= set(lines)


def test_ranks_of_one_memory_share_what_is_free():
    args = {"free_bytes": 8 * GIB, "max_num_seqs": 2048}
    alone, shared = budget_of(**args), budget_of(**args, data_parallel_size=4)
    assert alone.limit_bytes + alone.workspace_bytes == int(8 * GIB * 0.9)
    assert shared.limit_bytes + shared.workspace_bytes == int(8 * GIB * 0.9) // 4
