"""The engine of one rank: requests in, tokens out, one `step()` at a time. No sockets; `loop.py` adds them."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import torch

from deepserve.config import EngineArgs, EngineConfig
from deepserve.engine.balance import buffer_for_moves, initial_placements, layout_of, open_balancer, prepare_moves, regroup_experts
from deepserve.engine.lockstep import expert_step
from deepserve.engine.memory import MemoryBudget, plan_memory
from deepserve.engine.pages import Pages
from deepserve.engine.rehearsal import rehearse
from deepserve.engine.request import Limits, SequenceOutput
from deepserve.engine.runner import Launched, Runner
from deepserve.engine.scheduler import Scheduler, SchedulerConfig
from deepserve.engine.step import StepPlan
from deepserve.messages import ExpertBalance, Load, Submit
from deepserve.model.checkpoint import Checkpoint, dummy_weights, known_names, load_weights
from deepserve.model.config import ModelConfig
from deepserve.model.decoder import Decoder
from deepserve.model.hub import resolve_model
from deepserve.model.products import model_shapes
from eplb.load import PHASES
from hw.api import Backend, ExpertMode, ExpertStep, Unsupported
from hw.groups import Groups, open_groups
from hw.select import backend_facts, open_backend
from hw.weights import Weight
from mtp.schedule import DraftSchedule

logger = logging.getLogger(__name__)


def resolve(args: EngineArgs) -> EngineConfig:
    """From what a user said to a checked config: finds (or downloads) the model and reads its config. Raises ValueError."""
    if args.on_rank_death == "replan" and (reason := backend_facts(args.device).needs_all_ranks):
        raise Unsupported(f"{args.device}: on_rank_death 'replan': {reason}")
    folder = resolve_model(args.model, args.revision, with_weights=args.load_format != "dummy")
    return EngineConfig.resolve(args, str(folder), ModelConfig.from_folder(folder))


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread owns it."""

    def __init__(self, config: EngineConfig, groups: Groups | None = None, *, rank: int | None = None, progress: bool | None = None):
        """Loads this rank's part of the model; collective over the instance if it has several ranks.

        rank: whose part, if not that of its number in `groups`: the groups are those of one TP group, which joins others later (`regroup`).
        Raises ValueError for what cannot run, with the offending value or the table of memory.
        """
        args = config.args
        self.config = config
        self.groups = groups or open_groups(config.parallel, 0)
        self.backend = open_backend(
            args.device,
            self.groups,
            batch_invariant=args.batch_invariant,
            max_dispatch_tokens_per_rank=args.max_dispatch_tokens_per_rank,
            num_threads=args.num_threads,
            kernel_cache_dir=args.kernel_cache_dir,
            cpu_kernels=args.cpu_kernels,
        )
        started = time.perf_counter()
        rank = self.groups.rank if rank is None else rank
        prepares = self.backend.runtime.compiles if args.compile_ahead is None else args.compile_ahead
        if prepares:  # while the device is empty: compiling needs room there
            unfilled = build_model(config, self.backend, rank, torch.device("meta"))
            self.backend.runtime.warm_up(model_shapes(config, unfilled), progress)
        model = load_model(config, self.backend, rank=rank, progress=progress)
        model.reserve()  # before memory is planned
        rebalances = bool(model.moe_layers()) and (config.eplb.step_interval > 0 or args.on_rank_death == "replan")
        buffer = prepare_moves(model, self.backend, self.groups) if rebalances else None
        weight_bytes = sum(weight.target.nbytes for weight in model.weights())
        budget = plan_memory(config, model.cache_spec(), self.backend.runtime, weight_bytes)
        # Ranks of one machine see the same free memory, and all ranks must agree on what fits.
        num_pages = min(pages for (pages,) in self.groups.world.all_gather_ints([budget.num_pages]))
        self.memory: MemoryBudget = replace(budget, num_pages=num_pages)
        self.pages = Pages(self.memory.num_pages, config.page_size, prefix_caching=args.enable_prefix_caching)
        # Overlap needs a device that works while the host plans.
        self.asynchronous = self.backend.runtime.runs_ahead if args.async_scheduling is None else args.async_scheduling
        speculative = config.speculative
        drafts = None if speculative is None else DraftSchedule(speculative.num_speculative_tokens, speculative.adaptive)
        num_captured = self._num_captured()
        # Beyond this a step reaches experts another way, and is not captured.
        most_verified = args.max_dispatch_tokens_per_rank * self.groups.tp.size if num_captured else None
        limits = scheduler_config(config, max_in_flight=2 if self.asynchronous else 1, max_verified_tokens=most_verified)
        self.scheduler = Scheduler(limits, self.pages, drafts)
        self._launched: Launched | None = None
        # When that was, and when the one before was collected (0: it was the last for a while), by the performance counter.
        self._launched_s = self._collected_s = 0.0
        self.runner = Runner(
            model,
            self.backend,
            num_pages=self.memory.num_pages,
            page_size=config.page_size,
            max_num_seqs=args.max_num_seqs,
            max_model_len=config.max_model_len,
            max_drafts=0 if drafts is None else drafts.max_drafts,
            num_captured=num_captured,
            max_dispatch_tokens=args.max_dispatch_tokens_per_rank,
            overlaps=ExpertMode.LOW_LATENCY in self.overlap,
        )
        if prepares:
            cap, most = args.max_dispatch_tokens_per_rank, args.max_num_batched_tokens
            rehearse(model, self.backend, self.runner.caches, max_tokens=most, max_model_len=config.max_model_len, cap=cap)
        self.balancer = None if buffer is None else open_balancer(config, model, self.backend, self.groups, buffer)
        seconds = time.perf_counter() - started
        logger.info("loaded %s as %s in %.1f s\n%s", config.model_path, model.dtype, seconds, self.memory.table())

    def _num_captured(self) -> int:
        """Most sequences of a captured decode step: those of a full batch, if their tokens fit the low-latency dispatch."""
        args = self.config.args
        wanted = self.backend.runtime.captures if args.graphs is None else args.graphs
        return min(args.max_num_seqs, args.max_dispatch_tokens_per_rank * self.groups.tp.size) if wanted else 0

    @property
    def captures(self) -> bool:
        """Whether decode steps are captured; alike on all ranks."""
        return self.runner.graphs is not None

    @property
    def overlap(self) -> dict[ExpertMode, int]:
        """Tokens of a rank from which a step is overlapped; alike on all ranks."""
        args = self.config.args
        least = {ExpertMode.LOW_LATENCY: args.dbo_decode_token_threshold, ExpertMode.THROUGHPUT: args.dbo_prefill_token_threshold}
        return {mode: tokens for mode, tokens in least.items() if args.enable_dbo and tokens is not None}

    @property
    def limits(self) -> Limits:
        """What a request may ask for."""
        return self.config.limits(self.memory.num_pages)

    @property
    def has_work(self) -> bool:
        """Whether a sequence is unfinished or a step has yet to be collected."""
        return self.scheduler.has_work or self._launched is not None

    @property
    def has_launched(self) -> bool:
        """Whether a step is on the device, or done there and not collected."""
        return self._launched is not None

    def submit(self, request: Submit) -> None:
        """Queue a validated request."""
        self.scheduler.add(request.request_id, request.prompt_token_ids, request.params, request.cache_salt)

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests and free their pages; unknown ids are ignored."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    def abandon(self, request_ids: list[str]) -> None:
        """Forget requests after a step that failed half-way: plans in flight are dropped first."""
        self.discard()
        self.abort(request_ids)

    def discard(self) -> None:
        """Drop plans in flight, also one that failed half-way: what they had begun is done again."""
        self._launched = None
        self.scheduler.discard()

    def regroup(self) -> int:
        """Go on with the ranks that the groups have now; nothing is in flight. Collective over them.

        Returns how many experts of all layers were read from the checkpoint. Raises PeerLost, and ValueError where memory is short.
        """
        model = self.runner.model
        if self.balancer is None:
            return 0
        self.runner.wait()
        unread = regroup_experts(self.config, model, self.backend, self.groups)
        fill_weights(self.config, unread, ignored=lambda name: True, progress=False)
        self.balancer.regroup(layout_of(self.config, self.groups.parallel), buffer_for_moves(model, self.backend, self.groups))
        return len({weight.name.rsplit(".", 2)[0] for weight in unread})

    def knows(self, request_id: str) -> bool:
        """Whether any sequence of the request is waiting or running."""
        return self.scheduler.knows(request_id)

    def step(self) -> list[SequenceOutput]:
        """Plan, run, apply, for a rank that is alone. Empty when nothing could run, or when the result comes a step later."""
        plan = self.plan()
        if plan is None:
            return self.collect()
        cap = self.config.args.max_dispatch_tokens_per_rank
        return self.run(plan, expert_step([plan.num_tokens], cap))

    def plan(self) -> StepPlan | None:
        """What this rank's sequences want to run next. Ranks that do not lead their TP group have none of their own."""
        return self.scheduler.plan() if self.groups.is_leader else None

    def run(
        self, plan: StepPlan | None, step: ExpertStep, *, has_tokens: bool = True, num_drafts: int | None = None
    ) -> list[SequenceOutput]:
        """Run a step, and apply it or, with asynchronous scheduling, the one before; collective over the instance.

        `has_tokens`: whether this rank's TP group has a plan. `num_drafts`: most that a rank makes; None: the plan's.
        """
        if self.balancer is not None:
            self.runner.wait()
            self.balancer.turn()
        launched, launched_s = None, time.perf_counter()
        if has_tokens:
            launched = self.runner.launch(self._share(plan), step, num_drafts)
        else:
            self.runner.idle(step, num_drafts or 0)
        outputs = self.collect()
        self._launched, self._launched_s = launched, launched_s
        return outputs if self.asynchronous else self.collect()

    def collect(self) -> list[SequenceOutput]:
        """Apply the step that was launched last, if any."""
        launched, self._launched = self._launched, None
        if launched is None:
            return []
        result = self.runner.collect(launched)
        if not self.groups.is_leader:
            return []
        plan, drafts = launched.plan, self.scheduler.drafts
        # A step takes from the end of the one before, for what the host does in between does not come without it.
        begun_s, self._collected_s = self._collected_s or self._launched_s, time.perf_counter()
        if drafts is not None and not launched.new and plan.num_decode == len(plan.rows) and plan.num_drafts == plan.query_len - 1:
            drafts.observe_step(plan.num_decode, plan.num_drafts, self._collected_s - begun_s)
        outputs = self.scheduler.apply(result)
        if not self.has_work:
            self._collected_s = 0.0
        return outputs

    def _share(self, plan: StepPlan | None) -> StepPlan:
        """The leader's plan, on every rank of its TP group."""
        if self.groups.tp.size == 1:
            assert plan is not None
            return plan
        data = None if plan is None else msgspec.msgpack.encode(plan)
        shared = self.groups.tp.broadcast_bytes(data)
        return plan or msgspec.msgpack.decode(shared, type=StepPlan)

    def take_balance(self) -> ExpertBalance | None:
        """Where experts are, and their loads: on rank 0, once after each look at them."""
        if self.balancer is None or self.balancer.report is None:
            return None
        (profile, phy2log), self.balancer.report = self.balancer.report, None
        tokens = dict(zip(PHASES, profile.tokens.tolist(), strict=True))
        return ExpertBalance(self.groups.world.size, profile.num_steps, list(profile.layers), tokens, phy2log.tolist())

    def load(self) -> Load:
        """What this rank carries now."""
        scheduler, pages = self.scheduler, self.pages
        return Load(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_pages=pages.num_pages,
            num_held_pages=pages.num_held,
            num_cached_pages=pages.num_cached,
            num_moved_experts=0 if self.balancer is None else self.balancer.num_moved_experts,
            **{**vars(scheduler.stats), "num_accepted_by_position": list(scheduler.stats.num_accepted_by_position)},
        )


def load_model(config: EngineConfig, backend: Backend, *, rank: int = 0, progress: bool | None = None) -> Decoder:
    """Build this rank's part of the model and fill it from the checkpoint, or with seeded random weights."""
    model = build_model(config, backend, rank)
    fill_weights(config, model.weights(), ignored=known_names(config.model), progress=progress)
    return model


def fill_weights(config: EngineConfig, weights: list[Weight], *, ignored: Callable[[str], bool], progress: bool | None) -> None:
    """From the checkpoint or, where none is wanted, at random. ignored: see `load_weights`."""
    if config.args.load_format == "dummy":
        dummy_weights(weights, config.args.seed)
        return
    checkpoint = Checkpoint(config.model_path, config.model.quantization)
    load_weights(weights, checkpoint, ignored=ignored, progress=progress)
    checkpoint.close()


def build_model(config: EngineConfig, backend: Backend, rank: int, device: torch.device | None = None) -> Decoder:
    """This rank's part of the model, its weights unset. device: where, if not the backend's own; "meta" for shapes only."""
    args = config.args
    dtype_name = backend.runtime.compute_dtype(config.model.dtype) if args.dtype == "auto" else args.dtype
    return Decoder(
        config.model,
        backend,
        getattr(torch, dtype_name),
        parallel=config.parallel,
        rank=rank,
        max_model_len=config.max_model_len,
        num_redundant_experts=config.eplb.num_redundant_experts,
        placements=initial_placements(config),
        with_mtp=config.speculative is not None,
        keep_fp8=args.weight_format == "fp8" or (args.weight_format == "auto" and backend.keeps_fp8),
        device=device,
    )


def scheduler_config(config: EngineConfig, *, max_in_flight: int = 1, max_verified_tokens: int | None = None) -> SchedulerConfig:
    args = config.args
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_chunk_tokens=args.long_prefill_token_threshold or args.max_num_batched_tokens,
        chunked_prefill=args.enable_chunked_prefill,
        eos_token_ids=frozenset(config.model.eos_token_ids),
        max_in_flight=max_in_flight,
        max_verified_tokens=max_verified_tokens,
    )
