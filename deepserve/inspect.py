"""What a model would need here, without loading its weights: sizes, what each rank would hold, pages, refusals.

The same classes that serve are built on torch's meta device, so the numbers are those of a real start.
"""

from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from deepserve.config import EngineArgs, EngineConfig
from deepserve.engine.memory import MemoryBudget, plan_memory
from deepserve.model.config import ModelConfig
from deepserve.model.decoder import Decoder
from deepserve.model.hub import resolve_model
from deepserve.model.products import model_shapes
from hw.api import Backend, Unsupported
from hw.cache_spec import CacheSpec
from hw.rules import Facts, Provider
from hw.select import backend_facts, open_backend

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Place:
    """A rank's seat in a TP group, for building without peers."""

    rank: int
    size: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank would hold."""

    rank: int
    dp: int
    tp: int
    num_heads: int
    num_experts: int  # physical slots of a MoE layer
    weight_bytes: int


@dataclass(frozen=True)
class Report:
    """Everything `deepserve inspect` prints."""

    config: EngineConfig
    dtype: str
    bytes_per_token: float
    ranks: list[RankPlan]
    budget: MemoryBudget | None
    refusals: list[str]
    providers: list[Provider]  # who does each op


def inspect_model(args: EngineArgs) -> Report:
    """Raises ValueError for a model or flags that no machine could run; what does not fit this one is a refusal in the report."""
    folder = resolve_model(args.model, args.revision, with_weights=False)
    config = EngineConfig.resolve(args, str(folder), ModelConfig.from_folder(folder))
    facts = backend_facts(args.device)
    dtype = facts.compute_dtype(config.model.dtype) if args.dtype == "auto" else args.dtype
    # Without storage no device is needed, so any backend will do to build with.
    models = [_build(config, open_backend("cpu", cpu_kernels="torch"), facts, dtype, rank) for rank in range(config.parallel.num_ranks)]
    ranks = [_rank_plan(config, rank, model) for rank, model in enumerate(models)]
    spec = models[0].cache_spec()
    budget, refusals = _budget(config, spec, ranks)
    return Report(config, dtype, spec.bytes_per_token, ranks, budget, refusals, facts.providers(model_shapes(config, models[0])))


def _budget(config: EngineConfig, spec: CacheSpec, ranks: list[RankPlan]) -> tuple[MemoryBudget | None, list[str]]:
    """The pages that fit this machine's device, or why none do."""
    args = config.args
    try:
        runtime = open_backend(args.device, batch_invariant=args.batch_invariant, cpu_kernels="torch").runtime
    except Unsupported as error:
        return None, [str(error)]
    # What ranks of this machine share (of a CPU: its memory) they share when they start, too.
    sharing = runtime.num_sharing(len(ranks))
    weight_bytes = sum(rank.weight_bytes for rank in ranks[:sharing])
    free_bytes = runtime.memory().free_bytes
    if weight_bytes > free_bytes:
        whose = "all ranks" if sharing == len(ranks) else "a rank"
        return None, [f"the weights of {whose} take {size(weight_bytes)}, but {size(free_bytes)} of memory are free"]
    try:
        return plan_memory(config, spec, runtime, ranks[0].weight_bytes, reserved_bytes=weight_bytes), []
    except ValueError as error:
        return None, [str(error)]


def _build(config: EngineConfig, backend: Backend, facts: Facts, dtype: str, rank: int) -> Decoder:
    """One rank's model without storage."""
    place = Place(config.parallel.place(rank).tp, config.parallel.tp)
    return Decoder(
        config.model,
        replace(backend, tp=place),
        getattr(torch, dtype),
        parallel=config.parallel,
        rank=rank,
        max_model_len=1,
        num_redundant_experts=config.eplb.num_redundant_experts,
        with_mtp=config.speculative is not None,
        keep_fp8=config.args.weight_format == "fp8" or (config.args.weight_format == "auto" and facts.keeps_fp8),
        device=torch.device("meta"),
    )


def _rank_plan(config: EngineConfig, rank: int, model: Decoder) -> RankPlan:
    place = config.parallel.place(rank)
    experts = next((p.slots_per_rank for p in model.placements() if p is not None), 0)
    weight_bytes = sum(weight.target.nbytes for weight in model.weights())
    return RankPlan(rank, place.dp, place.tp, config.model.mla.num_heads // config.parallel.tp, experts, weight_bytes)


def show(report: Report, console: Console) -> None:
    """Print the report as tables."""
    config, model = report.config, report.config.model
    facts = Table("model", config.args.model, show_header=True, title_justify="left")
    facts.add_row("architecture", model.architecture)
    facts.add_row("parameters", f"{model.num_parameters() / 1e9:,.3f} billion, without MTP modules")
    facts.add_row("layers", f"{model.num_layers}, {len(model.moe_layers)} of them mixture of experts; {model.mtp.num_layers} MTP module(s)")
    facts.add_row("attention", f"{model.mla.num_heads} heads, latent {model.mla.kv_lora_rank} + rope {model.mla.qk_rope_head_dim}")
    if model.moe is not None:
        moe = model.moe
        facts.add_row("experts", f"{moe.num_experts} routed, top {moe.top_k}, {moe.num_shared_experts} shared")
    quantization = model.quantization
    stored = model.dtype if quantization is None else f"fp8 blocks of {quantization.block_n} x {quantization.block_k}, {model.dtype}"
    facts.add_row("stored as", stored)
    facts.add_row("computed in", report.dtype)
    facts.add_row("context", f"{config.max_model_len:,} of {model.max_position_embeddings:,} tokens")
    facts.add_row("cache per token", f"{report.bytes_per_token:,.0f} bytes over all layers")
    console.print(facts)
    ranks = Table("rank", "dp", "tp", "heads", "experts a layer", "weights")
    for plan in report.ranks:
        cells = (plan.rank, plan.dp, plan.tp, plan.num_heads, plan.num_experts)
        ranks.add_row(*map(str, cells), size(plan.weight_bytes))
    console.print(ranks)
    if report.budget is not None:
        pages = report.budget.num_pages
        console.print(f"pages of each rank: {pages:,} of {config.page_size} tokens, {pages * config.page_size:,} tokens in all")
        console.print(report.budget.table(), highlight=False)
    console.print(_provider_table(report))
    for refusal in report.refusals:
        console.print(f"does not fit this machine: {refusal}", style="red", highlight=False)


def _provider_table(report: Report) -> Table:
    """Who does each op on this device."""
    table = Table("op", "for", "done by", "and not by", title=f"who computes on {report.config.args.device}", title_justify="left")
    for provider in report.providers:
        table.add_row(provider.op, provider.shape, provider.served_by, provider.reason)
    return table


def size(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in _UNITS:
        if num_bytes < 1024 or unit == _UNITS[-1]:
            return f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
