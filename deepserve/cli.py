"""`deepserve serve | generate | inspect`: the command line, by the names that users of vLLM know; SGLang's are aliases."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deepserve import __version__
from deepserve.config import EngineArgs, SpeculativeConfig
from eplb.config import EPLBConfig


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _fail("interrupted", 130)


app = typer.Typer(
    name="deepserve",
    cls=_Commands,
    help="Serve DeepSeek-class mixture-of-experts models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DEFAULTS = EngineArgs()
_MODEL, _ENGINE, _CACHE, _SERVER = "Model", "Engine", "Cache and batch", "Server"

Model = Annotated[str, typer.Argument(help="Folder, hub id, or deepserve-tiny (the shipped model).", show_default=True)]


def _option(*names: str, help: str, panel: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


Revision = Annotated[str | None, _option("--revision", help="Branch, tag or commit of a hub model.", panel=_MODEL)]
Dtype = Annotated[str, _option("--dtype", help="auto (the checkpoint's, where the device computes it), float32 or bfloat16.", panel=_MODEL)]
LoadFormat = Annotated[str, _option("--load-format", help="auto, or dummy: random weights, for tests of speed.", panel=_MODEL)]
WeightFormat = Annotated[
    str, _option("--weight-format", help="Of FP8 checkpoints: fp8 keeps them, dequantized does not; auto: by device.", panel=_MODEL)
]
Seed = Annotated[int, _option("--seed", help="Of dummy weights.", panel=_MODEL)]
MaxModelLen = Annotated[
    int | None,
    _option("--max-model-len", "--context-length", help="Longest prompt with answer; default: the model's.", panel=_MODEL),
]
Device = Annotated[str, _option("--device", help="Backend: cpu or cuda.", panel=_ENGINE)]
Tp = Annotated[int, _option("--tensor-parallel-size", "--tp", "-tp", help="Ranks that share each attention layer.", panel=_ENGINE)]
Dp = Annotated[int, _option("--data-parallel-size", "--dp", "-dp", help="Replicas of attention; experts spread over all.", panel=_ENGINE)]
Redundant = Annotated[
    int, _option("--num-redundant-experts", help="Expert replicas beyond one copy of each, over all ranks.", panel=_ENGINE)
]
Invariant = Annotated[
    bool, _option("--batch-invariant", help="Results bitwise independent of what else is in the batch; slower.", panel=_ENGINE)
]
Async = Annotated[
    bool | None, _option("--async-scheduling/--no-async-scheduling", help="Plan a step while one runs; default: by device.", panel=_ENGINE)
]
Eplb = Annotated[
    str | None,
    _option(
        "--eplb-config",
        help='JSON: {"step_interval": 3000, "window_size": 1000}. Every so many steps hot experts may get replicas on other ranks, if '
        "that pays; 0 (default): experts stay. load_profile, dump_profile: files of loads to start from, and to write.",
        panel=_ENGINE,
    ),
]
Speculative = Annotated[
    str | None,
    _option(
        "--speculative-config",
        help='JSON: {"method": "mtp", "num_speculative_tokens": 2, "adaptive": true}. The MTP module drafts, the model verifies; the '
        "tokens are the same. adaptive (default): fewer drafts, or none, where they do not pay.",
        panel=_ENGINE,
    ),
]
NumSpeculative = Annotated[
    int | None,
    _option("--num-speculative-tokens", "--speculative-num-steps", help="Short for a config with so many; 0: none.", panel=_ENGINE),
]
Graphs = Annotated[
    bool | None, _option("--graphs/--enforce-eager", help="Capture decode steps and replay them; default: by device.", panel=_ENGINE)
]
EnableDbo = Annotated[
    bool,
    _option(
        "--enable-dbo/--disable-dbo",
        "--enable-two-batch-overlap",
        help="Large steps run as two micro-batches: one computes while the other's rows travel to experts. Needs several ranks.",
        panel=_ENGINE,
    ),
]
DboPrefill = Annotated[
    int, _option("--dbo-prefill-token-threshold", help="Tokens of a rank from which prefill steps are overlapped.", panel=_ENGINE)
]
DboDecode = Annotated[
    int | None,
    _option("--dbo-decode-token-threshold", help="Tokens of a rank from which decode steps are overlapped; default: never.", panel=_ENGINE),
]
CompileAhead = Annotated[
    bool | None,
    _option("--compile-ahead/--no-compile-ahead", help="Compile kernels before the first request; default: by device.", panel=_ENGINE),
]
KernelCache = Annotated[
    str | None, _option("--kernel-cache-dir", help="Where compiled kernels are kept; default: ~/.cache/deepserve/kernels.", panel=_ENGINE)
]
CpuKernels = Annotated[
    str, _option("--cpu-kernels", help="native: compiled here once, by g++ or clang++; torch; auto: native if that works.", panel=_ENGINE)
]
Threads = Annotated[int | None, _option("--num-threads", help="CPU threads of a rank.", panel=_ENGINE)]
StepTimeout = Annotated[
    float, _option("--step-timeout-s", "--watchdog-timeout", help="Seconds after which a rank that hangs counts as lost.", panel=_ENGINE)
]
OnRankDeath = Annotated[
    str,
    _option(
        "--on-rank-death",
        help="fail: the instance ends, non-zero, naming the rank. replan: the other ranks go on, and it is started again.",
        panel=_ENGINE,
    ),
]
MaxNumSeqs = Annotated[int, _option("--max-num-seqs", "--max-running-requests", help="Most sequences in a step.", panel=_CACHE)]
MaxTokens = Annotated[int, _option("--max-num-batched-tokens", help="Most tokens in a step.", panel=_CACHE)]
Chunked = Annotated[bool, _option("--enable-chunked-prefill/--no-enable-chunked-prefill", help="Cut long prompts.", panel=_CACHE)]
LongPrefill = Annotated[int, _option("--long-prefill-token-threshold", help="Most tokens of one prompt in a step; 0: all.", panel=_CACHE)]
Prefix = Annotated[bool, _option("--enable-prefix-caching/--no-enable-prefix-caching", help="Keep pages of past prompts.", panel=_CACHE)]
CacheBytes = Annotated[int | None, _option("--kv-cache-memory-bytes", help="Memory for pages; default: measured.", panel=_CACHE)]
Utilization = Annotated[
    float,
    _option("--memory-utilization", "--gpu-memory-utilization", "--mem-fraction-static", help="Share of free memory.", panel=_CACHE),
]


def _engine_args(values: dict[str, Any]) -> EngineArgs:
    found = {name: values[name] for name in EngineArgs.__struct_fields__ if name in values}
    for name, kind in (("speculative_config", SpeculativeConfig), ("eplb_config", EPLBConfig)):
        if text := found.get(name):
            try:
                found[name] = msgspec.json.decode(text, type=kind)
            except msgspec.DecodeError as error:
                _fail(f"--{name.replace('_', '-')} {text!r}: {error}")
    return EngineArgs(**found)


@app.command()
def serve(
    ctx: typer.Context,
    model: Model = _DEFAULTS.model,
    host: Annotated[str, _option("--host", help="Address to listen on.", panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, _option("--port", help="Port to listen on; 0: any free one.", panel=_SERVER)] = 8000,
    served_model_name: Annotated[list[str] | None, _option("--served-model-name", help="Names clients may use.", panel=_SERVER)] = None,
    api_key: Annotated[list[str] | None, _option("--api-key", help="Key(s) that clients must send.", panel=_SERVER)] = None,
    admin_api_key: Annotated[
        list[str] | None, _option("--admin-api-key", help="Key(s) of routes that change the server; default: closed.", panel=_SERVER)
    ] = None,
    chat_template: Annotated[str | None, _option("--chat-template", help="File that replaces the model's template.", panel=_SERVER)] = None,
    generation_config: Annotated[str, _option("--generation-config", help="auto: the model's defaults; none.", panel=_SERVER)] = "auto",
    max_concurrent_requests: Annotated[int, _option("--max-concurrent-requests", help="Beyond it: 429.", panel=_SERVER)] = 4096,
    max_body_bytes: Annotated[int, _option("--max-body-bytes", help="Beyond it: 413.", panel=_SERVER)] = 16 << 20,
    shutdown_timeout: Annotated[
        float | None, _option("--shutdown-timeout", help="Seconds a drain may take; default: as long as it needs.", panel=_SERVER)
    ] = None,
    access_log: Annotated[bool, _option("--access-log/--no-access-log", help="One line for each request.", panel=_SERVER)] = False,
    revision: Revision = None,
    dtype: Dtype = _DEFAULTS.dtype,
    load_format: LoadFormat = _DEFAULTS.load_format,
    weight_format: WeightFormat = _DEFAULTS.weight_format,
    seed: Seed = _DEFAULTS.seed,
    max_model_len: MaxModelLen = None,
    device: Device = _DEFAULTS.device,
    tensor_parallel_size: Tp = 1,
    data_parallel_size: Dp = 1,
    num_redundant_experts: Redundant = 0,
    eplb_config: Eplb = None,
    batch_invariant: Invariant = False,
    graphs: Graphs = None,
    async_scheduling: Async = None,
    enable_dbo: EnableDbo = False,
    dbo_prefill_token_threshold: DboPrefill = _DEFAULTS.dbo_prefill_token_threshold,
    dbo_decode_token_threshold: DboDecode = None,
    speculative_config: Speculative = None,
    num_speculative_tokens: NumSpeculative = None,
    compile_ahead: CompileAhead = None,
    kernel_cache_dir: KernelCache = None,
    cpu_kernels: CpuKernels = _DEFAULTS.cpu_kernels,
    num_threads: Threads = None,
    max_num_seqs: MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxTokens = _DEFAULTS.max_num_batched_tokens,
    enable_chunked_prefill: Chunked = True,
    long_prefill_token_threshold: LongPrefill = 0,
    enable_prefix_caching: Prefix = True,
    kv_cache_memory_bytes: CacheBytes = None,
    memory_utilization: Utilization = _DEFAULTS.memory_utilization,
    step_timeout_s: StepTimeout = _DEFAULTS.step_timeout_s,
    on_rank_death: OnRankDeath = _DEFAULTS.on_rank_death,
) -> None:
    """Serve a model over the OpenAI API. SIGTERM or Ctrl-C finishes what runs, exit code 0; a second one stops at once."""
    _serve(ctx.obj, locals())


@app.command()
def generate(
    model: Model = _DEFAULTS.model,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Prompt text; may be given several times.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="One prompt a line; - reads stdin.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Put each prompt through the chat template.")] = True,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    sampling_seed: Annotated[int | None, typer.Option("--sampling-seed", help="Makes sampled answers repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt instead of text.")] = False,
    revision: Revision = None,
    dtype: Dtype = _DEFAULTS.dtype,
    load_format: LoadFormat = _DEFAULTS.load_format,
    weight_format: WeightFormat = _DEFAULTS.weight_format,
    seed: Seed = _DEFAULTS.seed,
    max_model_len: MaxModelLen = None,
    device: Device = _DEFAULTS.device,
    batch_invariant: Invariant = False,
    speculative_config: Speculative = None,
    num_speculative_tokens: NumSpeculative = None,
    compile_ahead: CompileAhead = None,
    kernel_cache_dir: KernelCache = None,
    cpu_kernels: CpuKernels = _DEFAULTS.cpu_kernels,
    num_threads: Threads = None,
    max_num_seqs: MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxTokens = _DEFAULTS.max_num_batched_tokens,
    kv_cache_memory_bytes: CacheBytes = None,
    memory_utilization: Utilization = _DEFAULTS.memory_utilization,
) -> None:
    """Answer prompts without a server: deepserve generate -p "What is 12+30?"."""
    args = _engine_args(locals())
    prompts = _prompts(prompt or [], file)
    from deepserve.engine.request import SamplingParams
    from deepserve.llm import LLM

    try:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=sampling_seed)
        with LLM(**{name: getattr(args, name) for name in EngineArgs.__struct_fields__}) as llm:
            messages = [[{"role": "user", "content": text}] for text in prompts]
            outputs = llm.chat(messages, params) if chat else llm.generate(prompts, params)
    except ValueError as error:
        _fail(str(error))
    for text, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        if as_json:
            print(json.dumps({"prompt": text, "text": answer.text, "finish_reason": answer.finish_reason}, ensure_ascii=False))
        else:
            print(answer.text)


@app.command()
def inspect(
    model: Model = _DEFAULTS.model,
    revision: Revision = None,
    dtype: Dtype = _DEFAULTS.dtype,
    weight_format: WeightFormat = _DEFAULTS.weight_format,
    max_model_len: MaxModelLen = None,
    device: Device = _DEFAULTS.device,
    tensor_parallel_size: Tp = 1,
    data_parallel_size: Dp = 1,
    num_redundant_experts: Redundant = 0,
    num_speculative_tokens: NumSpeculative = None,
    max_num_seqs: MaxNumSeqs = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxTokens = _DEFAULTS.max_num_batched_tokens,
    kv_cache_memory_bytes: CacheBytes = None,
    memory_utilization: Utilization = _DEFAULTS.memory_utilization,
) -> None:
    """Show a model's sizes, what each rank would hold and what fits here, without loading weights. Exit code 1: it does not fit."""
    args = _engine_args(locals())
    from rich.console import Console

    from deepserve.inspect import inspect_model, show

    try:
        report = inspect_model(args)
    except ValueError as error:
        _fail(str(error))
    show(report, Console())
    if report.refusals:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _serve(launcher: Callable[[EngineArgs], Any] | None, flags: dict[str, Any]) -> None:
    """Check what can be checked here, then serve until the end."""
    args = _engine_args(flags)
    # Neither torch nor a device library here: the engine process loads them while this one starts.
    from deepserve.model.config import ModelConfig
    from deepserve.model.hub import resolve_model
    from deepserve.server.lifecycle import run_server
    from deepserve.server.state import ServerOptions
    from deepserve.spawn import LocalInstance

    try:
        folder = str(resolve_model(args.model, args.revision, with_weights=args.load_format != "dummy"))
        _check(args, folder, ModelConfig.from_folder(folder))
        options = ServerOptions(
            model_path=folder,
            served_model_name=tuple(flags["served_model_name"] or [args.model]),
            host=flags["host"],
            port=flags["port"],
            num_engines=args.data_parallel_size,
            engine_silence_limit_s=args.step_timeout_s,
            api_key=tuple(flags["api_key"] or ()),
            admin_api_key=tuple(flags["admin_api_key"] or ()),
            chat_template=flags["chat_template"],
            generation_config=flags["generation_config"],
            max_concurrent_requests=flags["max_concurrent_requests"],
            max_body_bytes=flags["max_body_bytes"],
            shutdown_timeout_s=flags["shutdown_timeout"],
            access_log=flags["access_log"],
        )
    except ValueError as error:
        _fail(str(error))
    # `launch.worker` puts a launcher here, to run one rank under torchrun instead of all ranks of this machine.
    instance = (launcher or LocalInstance)(args)
    sys.exit(instance.guard() if instance.follows else run_server(options, instance))


def _check(args: EngineArgs, folder: str, model: Any) -> None:
    """What the engine would refuse is refused here, before a process starts."""
    from deepserve.config import EngineConfig

    EngineConfig.resolve(args, folder, model)


def _prompts(given: list[str], file: Path | None) -> list[str]:
    if file is not None:
        try:
            text = sys.stdin.read() if str(file) == "-" else file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            _fail(f"cannot read prompts from {file}: {error}")
        given = given + [line for line in text.split("\n") if line.strip()]
    if not given:
        _fail("no prompt: give --prompt TEXT or --file PATH")
    return given


def _fail(sentence: str, code: int = 1) -> Any:
    print(f"deepserve: {sentence}", file=sys.stderr)
    raise typer.Exit(code)
