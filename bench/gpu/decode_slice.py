"""Decode speed of DeepSeek-V3's geometry, through the whole engine: scheduler, captured steps, sampling, and votes if there are ranks.

    python bench/gpu/decode_slice.py [--dp 1] [--num-seqs 1 64 128 256] [--context 4096] [--steps 64] [--layers 61] [--breakdown] [--json F]
    python bench/gpu/decode_slice.py --mtp 1 [--acceptance 0.8] ...

All 61 layers with FP8 dummy weights, but 8 routed experts for each GPU, top 8: at batch b on each GPU an expert gets b tokens, on one GPU
exactly and on several on average, the load per expert of a wide expert-parallel deployment in which each rank holds a few experts. What
the slice leaves out: dispatch and combine between machines, on one GPU between any ranks, and most of the imbalance of real routing.

The context is not computed: random latents are put into the pages and published as if prompts had been computed before, so each sequence
starts from a prefix hit and the first step computes its last page only.

With --mtp each step verifies that many drafts a sequence and makes as many. Dummy weights agree with nobody's drafts, so whether a draft
stands is forced: a coin for each position, `--acceptance` of them heads. All that a step does is done: drafts are made, verified, taken
back. Tokens per second count what is kept.

Host gap: the time of a step in which the GPU does nothing and waits for the host. With the breakdown (`breakdown.py`), printed for each
number of sequences: what each stage takes, and the sum of all ops alone, which is what a step without gaps and without anything between
its ops would take.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path

import torch
from breakdown import breakdown
from gpu_trace import trace
from ranks import Stepper, run_ranks

from deepserve.config import EngineArgs, SpeculativeConfig
from deepserve.engine.engine import Engine, resolve
from deepserve.engine.request import SamplingParams, validate
from deepserve.engine.state import RowState
from deepserve.messages import Submit
from hw.groups import Groups
from hw.topology import ParallelConfig

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
    "rope_theta": 10000, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                     "mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip


# Microseconds of ops at 128 sequences as the design page (section 11) has them, measured before there was an engine.
RECORDED_128 = {"mla_decode": 232, "linear 2112 x 7168": 18, "linear 24576 x 1536": 23, "linear 7168 x 16384": 51}


# Parts of the names of kernels that bring rows to other ranks, or wait for them.
BETWEEN_RANKS = ("deep_ep", "nccl", "_packets_kernel", "meet_kernel")

# For rehearsals on a CPU.
NARROW = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
          "moe_intermediate_size": 256}  # fmt: skip


def v3(num_layers: int, num_experts: int, *, narrow: bool) -> dict:
    """The config of a slice; with all 256 experts the gate limits a token to four of eight groups, as the model's own does."""
    sizes = {"num_hidden_layers": num_layers, "n_routed_experts": num_experts, "num_nextn_predict_layers": 1}
    return {**V3, **sizes, **({"n_group": 8, "topk_group": 4} if num_experts == 256 else {}), **(NARROW if narrow else {})}


def make_engine(folder: Path, groups: Groups, args: argparse.Namespace) -> Engine:
    (folder / "config.json").write_text(json.dumps(v3(args.layers, args.experts * args.dp, narrow=args.device == "cpu")))
    most, width = max(args.num_seqs), 1 + args.mtp
    max_model_len = -(-(args.context + width * (args.steps + 48) + 96) // 64) * 64
    options = {
        "model": str(folder), "device": args.device, "load_format": "dummy", "max_model_len": max_model_len, "max_num_seqs": most,
        "max_num_batched_tokens": args.batch or max(2048, 64 * most), "max_dispatch_tokens_per_rank": most * width,
        "num_pages": most * max_model_len // 64, "compile_ahead": False,
        "enable_dbo": args.enable_dbo, "dbo_decode_token_threshold": 1,
        "data_parallel_size": args.dp, "speculative_config": SpeculativeConfig(num_speculative_tokens=args.mtp, adaptive=False),
    }  # fmt: skip
    if args.device == "cpu":  # a rehearsal
        options |= {"graphs": True, "async_scheduling": True, "weight_format": "fp8", "dtype": "float32", "cpu_kernels": "torch"}
    return Engine(resolve(EngineArgs(**options)), groups)


def force_acceptance(share: float) -> None:
    """From now on drafts stand by the toss of a coin, keyed by row and position, whatever was drawn."""

    def accepted(self: RowState, rows: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        positions = self.lens[rows][:, None] + torch.arange(draws.shape[1] - 1, device=draws.device)
        mixed = positions * 2654435761 + rows[:, None] * 2654435789
        mixed = (mixed ^ (mixed >> 15)) * 2246822519
        return (((mixed >> 13) & 1023) < share * 1024).long().cumprod(1).sum(1)

    RowState.accepted = accepted


def pretend_computed(engine: Engine, prompt: list[int]) -> None:
    """Publish all whole pages of a prompt; what they hold is random already."""
    pages, tokens = engine.pages, array("i", prompt)
    num_pages = len(prompt) // pages.page_size
    taken = pages.allocate(num_pages)
    parent = pages.root_hash("")
    for page_idx, page in enumerate(taken):
        parent = pages.publish(page, tokens, page_idx, parent)
    pages.release(taken)


def measure(stepper: Stepper, num_seqs: int, args: argparse.Namespace) -> dict:
    """Median time of a decode step of `num_seqs` sequences on each rank, and where it goes."""
    engine = stepper.engine
    rng = random.Random(1000 * engine.groups.rank + num_seqs)
    for i in range(num_seqs):
        prompt = [rng.randrange(2, engine.config.model.vocab_size) for _ in range(args.context + 1)]
        pretend_computed(engine, prompt)
        params = SamplingParams(temperature=0.0, max_tokens=(1 + args.mtp) * (args.steps + 48), ignore_eos=True)
        engine.submit(Submit(f"{num_seqs}-{i}", prompt, validate(prompt, params, engine.limits)))
    while len(engine.scheduler.running) < num_seqs or engine.scheduler.waiting:
        stepper.step()
    for _ in range(8):
        stepper.step()
    times, host, before = [], [], engine.load()
    for _ in range(args.steps):
        started = time.perf_counter()
        stepper.step()
        times.append(time.perf_counter() - started)
        host.append(stepper.plan_s)
    after = engine.load()
    kept = (after.num_generated_tokens - before.num_generated_tokens) / (args.steps * num_seqs)
    stood = (after.num_accepted_tokens - before.num_accepted_tokens) / max(1, after.num_draft_tokens - before.num_draft_tokens)
    looked = args.breakdown is not None and (not args.breakdown or num_seqs in args.breakdown)
    inside = look_inside(stepper) if looked else {}
    engine.abort([f"{num_seqs}-{i}" for i in range(num_seqs)])
    engine.collect()
    engine.pages.forget_cached()
    step_s = statistics.median(times)
    figures = {"num_seqs": num_seqs, "step_ms": step_s * 1e3, "plan_ms": statistics.median(host) * 1e3}
    figures |= {"tokens_per_step": kept, "tokens_per_s": num_seqs * kept / step_s, "forced_acceptance": stood if args.mtp else None}
    return figures | inside


def look_inside(stepper: Stepper) -> dict:
    """Milliseconds a step: host gap, what the way to experts and back takes, stages, ops alone; with several ranks kernels instead of the
    last two, since some ops of one rank wait for the others.
    """
    found = trace(stepper.step, 8)
    inside = {"host_gap_ms": found.host_gap_ms, "busy_ms": found.busy_ms}
    inside["between_ranks_ms"] = sum(ms for name, _, ms in found.kernels if any(part in name for part in BETWEEN_RANKS))
    if stepper.engine.groups.world.size > 1:
        return inside | {"table": found.table(28)}
    parts = breakdown(stepper.engine, stepper.step)
    alone = {": ".join(key): ms for key, ms in parts.alone.items()}
    return inside | {"stages_ms": parts.stages, "alone_ms": parts.alone_ms, "ops_alone_ms": alone, "table": parts.table()}


def print_inside(rows: list[dict], num_layers: int) -> None:
    """The breakdown of each row, and at 128 sequences what the design page had for the same ops."""
    for row in rows:
        if "table" in row:
            print(f"\n{row['num_seqs']} sequences\n{row['table']}")
        if row["num_seqs"] == 128 and "alone_ms" in row:
            for op, us in RECORDED_128.items():
                print(f"  design page, section 11: {op}, {num_layers} layers: {us * num_layers / 1e3:.2f} ms")
            print("  design page: all kernels of a step of 61 layers at 128 sequences together: about 33 ms")


def run(groups: Groups, args: argparse.Namespace) -> None:
    """One rank; the first prints."""
    started, prints = time.perf_counter(), groups.rank == 0
    if args.mtp:
        force_acceptance(args.acceptance)
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), groups, args)
    for cache in engine.runner.caches:
        cache.normal_(std=0.5)
    stepper = Stepper(engine)
    start_s = time.perf_counter() - started
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    if prints:
        print(f"{card} x {args.dp}, torch {torch.__version__}, {args.layers} layers, context {args.context}, start {start_s:.1f} s")
        print(engine.memory.table())
        print(f"left out: dispatch and combine between {'any ranks' if args.dp == 1 else 'machines'}, uneven routing")
        if args.mtp:
            print(f"{args.mtp} draft(s) a step, acceptance FORCED to {args.acceptance}: dummy weights agree with nobody's drafts")
        gpu = "" if args.dp == 1 else "/GPU"
        print(
            f"{'sequences' + gpu:>14}{'step, ms':>12}{'plan, ms':>12}{'tokens/step':>13}{'tokens/s' + gpu:>14}{'host gap, ms':>15}"
            f"{'between ranks, ms':>19}"
            f"{'ops alone, ms':>16}{'step / alone':>15}"
        )
    rows = []
    for num_seqs in args.num_seqs:
        rows.append(measure(stepper, num_seqs, args))
        row = rows[-1]
        cells = f"{row['step_ms']:>12.2f}{row['plan_ms']:>12.2f}{row['tokens_per_step']:>13.2f}{row['tokens_per_s']:>14.0f}"
        if "table" in row:
            cells += f"{row['host_gap_ms']:>15.3f}{row['between_ranks_ms']:>19.2f}"
        if "alone_ms" in row:
            cells += f"{row['alone_ms']:>16.2f}{row['step_ms'] / row['alone_ms']:>15.2f}"
        if prints:
            print(f"{num_seqs:>14}{cells}", flush=True)
    if prints:
        print_inside(rows, args.layers)
    if prints and args.json:
        facts = {"card": card, "torch": torch.__version__, "dp": args.dp, "mtp": args.mtp, "dbo": args.enable_dbo}
        Path(args.json).write_text(json.dumps({**facts, "start_s": start_s, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=1, help="ranks, each with a GPU and as many sequences")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=8, help="routed experts for each GPU; 32 with --dp 8: all that the model has")
    parser.add_argument("--enable-dbo", action="store_true", help="every step as two micro-batches; needs several ranks")
    parser.add_argument("--batch", type=int, help="most tokens of a step; default: the last page of every sequence")
    parser.add_argument("--mtp", type=int, default=0, help="drafts a step")
    parser.add_argument("--acceptance", type=float, default=0.8, help="share of drafts that are made to stand")
    parser.add_argument("--device", default="cuda", help="cpu only rehearses, with narrow layers")
    parser.add_argument("--breakdown", type=int, nargs="*", metavar="SEQS", help="where a step's time goes, at these sizes or at all")
    parser.add_argument("--json")
    args = parser.parse_args()
    run_ranks(ParallelConfig(dp=args.dp), run, args)


if __name__ == "__main__":
    main()
