"""What an engine runs with. `EngineArgs` is what a user said; `EngineConfig` is that, resolved and checked once.

Both are torch-free: the frontend reads them without loading a device library.
"""

import msgspec

from deepserve.engine.request import Limits
from deepserve.model.config import ModelConfig
from eplb.config import EPLBConfig
from hw.topology import ParallelConfig

PAGE_SIZE = 64
DTYPES = ("auto", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
WEIGHT_FORMATS = ("auto", "fp8", "dequantized")
CPU_KERNELS = ("auto", "native", "torch")
# "fail": the instance ends, non-zero, naming the rank; "replan": the others go on, and the dead one is started again.
RANK_DEATH_POLICIES = ("fail", "replan")


MAX_SPECULATIVE_TOKENS = 16
SPECULATIVE_METHODS = ("mtp", "deepseek_mtp")  # two names of one method


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens that the model's MTP module drafts and the model verifies; the tokens that come out are the same."""

    method: str = "mtp"
    num_speculative_tokens: int = 1
    adaptive: bool = True  # fewer drafts, or none, where measured acceptance and step times say that they do not pay


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one engine, by the names of `deepserve serve` flags and of `LLM(...)`."""

    model: str = "deepserve-tiny"  # folder, hub id, or the name of the shipped model
    revision: str | None = None
    device: str = "cpu"  # a backend of hw.select
    dtype: str = "auto"
    load_format: str = "auto"  # "dummy": seeded random weights, no checkpoint needed
    weight_format: str = "auto"  # of block-FP8 checkpoints: "fp8" keeps them, "dequantized" does not; auto: what suits the device
    seed: int = 0  # of dummy weights
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    num_nodes: int = 1  # machines that the ranks are spread over evenly, rank by rank
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0  # most prompt tokens of one sequence in a step; 0: the whole budget
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.9
    num_pages: int | None = None  # overrides the memory budget
    num_redundant_experts: int = 0  # short for an eplb_config with this many
    eplb_config: EPLBConfig | None = None
    max_dispatch_tokens_per_rank: int = 256  # cap of the low-latency expert dispatch: a full batch decodes in that mode
    enable_dbo: bool = False  # dual batch overlap: large steps run as two micro-batches, one computes while the other's rows travel
    dbo_prefill_token_threshold: int = 512  # tokens of a rank from which prefill steps (beyond max_dispatch_tokens_per_rank) do
    dbo_decode_token_threshold: int | None = None  # tokens of a rank from which the others do; None: never
    batch_invariant: bool = False
    graphs: bool | None = None  # capture decode steps and replay them; None: where that is cheaper
    speculative_config: SpeculativeConfig | None = None
    num_speculative_tokens: int | None = None  # short for a speculative_config with this many; 0: none
    async_scheduling: bool | None = None  # plan a step while the one before it runs; None: where the device works on its own
    compile_ahead: bool | None = None  # compile and try out kernels before the first request; None: where they are slow at first use
    kernel_cache_dir: str | None = None  # where kernels compiled for this model are kept between starts; None: the backend's choice
    cpu_kernels: str = "auto"  # "native": compiled by the machine's own compiler; "torch"; auto: native where they can be had
    num_threads: int | None = None  # CPU threads of a rank; None: the backend's choice
    step_timeout_s: float = 120.0  # a rank that is silent, or late to a collective, for this long is lost, and its instance ends
    on_rank_death: str = "fail"  # what becomes of an instance when a rank dies


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank needs to start, checked. Build it with `EngineConfig.resolve`."""

    args: EngineArgs
    model_path: str
    model: ModelConfig
    parallel: ParallelConfig
    eplb: EPLBConfig
    speculative: SpeculativeConfig | None
    max_model_len: int
    page_size: int = PAGE_SIZE

    @classmethod
    def resolve(cls, args: EngineArgs, model_path: str, model: ModelConfig) -> "EngineConfig":
        """Compose and check. Raises ValueError with the offending value."""
        _check_types(args)
        if args.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {args.dtype!r}")
        if args.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {args.load_format!r}")
        if args.weight_format not in WEIGHT_FORMATS:
            raise ValueError(f"weight_format must be one of {', '.join(WEIGHT_FORMATS)}, got {args.weight_format!r}")
        if args.cpu_kernels not in CPU_KERNELS:
            raise ValueError(f"cpu_kernels must be one of {', '.join(CPU_KERNELS)}, got {args.cpu_kernels!r}")
        if args.weight_format == "fp8" and model.quantization is None:
            raise ValueError("weight_format 'fp8' needs a checkpoint in block-FP8, this one is not")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_dispatch_tokens_per_rank", "dbo_prefill_token_threshold"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")
        for name in ("num_pages", "num_threads", "kv_cache_memory_bytes", "max_model_len", "dbo_decode_token_threshold"):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")
        if args.long_prefill_token_threshold < 0:
            raise ValueError(f"long_prefill_token_threshold must be at least 0, got {args.long_prefill_token_threshold}")
        if not 0.0 < args.memory_utilization <= 1.0:
            raise ValueError(f"memory_utilization must be above 0 and at most 1, got {args.memory_utilization}")
        max_model_len = args.max_model_len or model.max_position_embeddings
        if max_model_len > model.max_position_embeddings:
            raise ValueError(f"max_model_len {max_model_len} exceeds the {model.max_position_embeddings} positions of the model")
        if not args.enable_chunked_prefill and args.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"without chunked prefill a step must hold a whole prompt: max_num_batched_tokens {args.max_num_batched_tokens} "
                f"is below max_model_len {max_model_len}"
            )
        if not args.enable_chunked_prefill and args.long_prefill_token_threshold:
            raise ValueError(f"long_prefill_token_threshold {args.long_prefill_token_threshold} needs chunked prefill")
        for name in ("tensor_parallel_size", "data_parallel_size"):
            if getattr(args, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(args, name)}")
        if model.mla.num_heads % args.tensor_parallel_size:
            raise ValueError(f"tensor_parallel_size {args.tensor_parallel_size} does not divide the model's {model.mla.num_heads} heads")
        if args.on_rank_death not in RANK_DEATH_POLICIES:
            raise ValueError(f"on_rank_death must be one of {', '.join(RANK_DEATH_POLICIES)}, got {args.on_rank_death!r}")
        if args.on_rank_death == "replan" and args.num_nodes > 1:
            raise ValueError(f"on_rank_death 'replan' needs all ranks of an instance on one host, num_nodes is {args.num_nodes}")
        if not 0.0 < args.step_timeout_s < float("inf"):
            raise ValueError(f"step_timeout_s must be a number above 0, got {args.step_timeout_s}")
        if args.enable_dbo and args.tensor_parallel_size * args.data_parallel_size == 1:
            raise ValueError("enable_dbo overlaps what travels between ranks, and this instance has one rank")
        parallel = ParallelConfig(dp=args.data_parallel_size, tp=args.tensor_parallel_size, nodes=args.num_nodes)
        return cls(
            args=args,
            model_path=model_path,
            model=model,
            parallel=parallel,
            eplb=_eplb(args),
            speculative=_speculative(args, model),
            max_model_len=max_model_len,
        )

    def limits(self, num_pages: int) -> Limits:
        """What a request may ask for, given the pages a rank found room for."""
        return Limits(vocab_size=self.model.vocab_size, max_model_len=self.max_model_len, max_seq_tokens=num_pages * self.page_size)


def _eplb(args: EngineArgs) -> EPLBConfig:
    config, short = args.eplb_config or EPLBConfig(), args.num_redundant_experts
    if short and config.num_redundant_experts not in (0, short):
        raise ValueError(f"num_redundant_experts is {short}, but eplb_config says {config.num_redundant_experts}")
    return msgspec.structs.replace(config, num_redundant_experts=short) if short else config


def _speculative(args: EngineArgs, model: ModelConfig) -> SpeculativeConfig | None:
    config, short = args.speculative_config, args.num_speculative_tokens
    if config is not None and short is not None and short != config.num_speculative_tokens:
        raise ValueError(f"num_speculative_tokens is {short}, but speculative_config says {config.num_speculative_tokens}")
    if config is None and short is not None:
        config = SpeculativeConfig(num_speculative_tokens=short)
    if config is None:
        return None
    if config.method not in SPECULATIVE_METHODS:
        raise ValueError(f"speculative method must be one of {', '.join(SPECULATIVE_METHODS)}, got {config.method!r}")
    if not 0 <= config.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(f"num_speculative_tokens must be from 0 to {MAX_SPECULATIVE_TOKENS}, got {config.num_speculative_tokens}")
    if not config.num_speculative_tokens:
        return None
    if not model.mtp.num_layers:
        raise ValueError(f"speculative method {config.method!r} needs a model with an MTP module, this one has none")
    return config


def _check_types(args: EngineArgs) -> None:
    """What came as keyword arguments has whatever types the caller gave it."""
    try:
        msgspec.convert(msgspec.structs.asdict(args), EngineArgs)
    except msgspec.ValidationError as error:
        raise ValueError(f"engine arguments: {error}") from None
