"""How many pages fit: weights and workspace are known, the rest is pages. A shortfall is refused with the table of numbers."""

from dataclasses import dataclass

from deepserve.config import EngineConfig
from hw.api import Runtime
from hw.cache_spec import CacheSpec

_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one rank; `num_pages` is what they come to."""

    total_bytes: int
    free_bytes: int  # with the weights loaded
    weight_bytes: int
    workspace_bytes: int
    page_bytes: int
    limit_bytes: int  # most that pages may take
    num_pages: int

    def table(self) -> str:
        """Lines of numbers for logs and errors."""
        rows = [
            ("device memory", self.total_bytes),
            ("weights", self.weight_bytes),
            ("free after weights", self.free_bytes),
            ("workspace", self.workspace_bytes),
            ("limit for pages", self.limit_bytes),
            ("one page", self.page_bytes),
            ("pages", self.num_pages * self.page_bytes),
        ]
        lines = [f"  {name:<20}{amount / _MIB:>14,.2f} MiB" for name, amount in rows]
        return "\n".join([*lines, f"  {'number of pages':<20}{self.num_pages:>14,}"])


def plan_memory(config: EngineConfig, spec: CacheSpec, runtime: Runtime, weight_bytes: int, *, reserved_bytes: int = 0) -> MemoryBudget:
    """Decide the number of pages. `reserved_bytes` of the memory that is free now will be taken by then, by weights yet to load.

    Raises ValueError with the table if a sequence of max_model_len tokens does not fit.
    """
    args, memory = config.args, runtime.memory()
    free_bytes = memory.free_bytes - reserved_bytes
    page_bytes = spec.page_bytes(config.page_size)
    workspace_bytes = _workspace_bytes(config)
    # Every sequence at full length: more pages could only hold prefixes of sequences that left.
    pages_per_seq = -(-config.max_model_len // config.page_size)
    useful_bytes = args.max_num_seqs * pages_per_seq * page_bytes
    if args.kv_cache_memory_bytes is not None:
        limit_bytes = args.kv_cache_memory_bytes
    else:
        # Ranks that share this memory share what is free.
        spare = int(free_bytes * args.memory_utilization) // runtime.num_sharing(config.parallel.ranks_per_node) - workspace_bytes
        limit_bytes = max(0, min(spare, runtime.default_cache_bytes() or spare, useful_bytes))
    num_pages = args.num_pages if args.num_pages is not None else limit_bytes // page_bytes
    budget = MemoryBudget(memory.total_bytes, free_bytes, weight_bytes, workspace_bytes, page_bytes, limit_bytes, num_pages)
    if num_pages < 1 or (num_pages < pages_per_seq and args.num_pages is None):
        raise ValueError(
            f"{num_pages} pages fit, but one sequence of max_model_len {config.max_model_len} tokens needs {pages_per_seq}; "
            f"lower max_model_len or raise kv_cache_memory_bytes\n{budget.table()}"
        )
    return budget


def _workspace_bytes(config: EngineConfig) -> int:
    """Upper estimate of what one step allocates: activations of the widest layer, expert rows, and logits, in fp32."""
    model, tokens = config.model, config.args.max_num_batched_tokens
    mla = model.mla
    attention = mla.num_heads * (2 * mla.qk_head_dim + 2 * mla.v_head_dim + mla.latent_dim)
    mlp = 3 * model.intermediate_size
    if model.moe is not None:
        mlp = max(mlp, model.moe.top_k * (3 * model.moe.intermediate_size + 2 * model.hidden_size))
    num_draws = config.args.max_num_seqs * (1 + (config.speculative.num_speculative_tokens if config.speculative else 0))
    logits = 2 * max(num_draws, 256) * model.vocab_size
    return 4 * (tokens * (attention + mlp + 4 * model.hidden_size) + logits)
