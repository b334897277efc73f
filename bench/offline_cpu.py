"""Offline generation with a 145 M parameter DeepSeek-V3 of random weights on a CPU, beside other engines in the same sitting.

    python bench/offline_cpu.py [--dtype bfloat16 float32] [--threads 2] [--runs 5] [--clock wall] [--transformers]
        [--vllm-python VENV/bin/python] [--llama-server BINARY --gguf FILE ...] [--model FOLDER ...] [--json FILE]

Greedy, end tokens ignored, prompts of random token ids that are new in each run, so that no prefix is found again:

batch    16 prompts of 64 tokens, 64 new ones each, all at once: new tokens over the whole time, prefill included
single   one prompt of 64 tokens: 64 over the difference between the times of 65 new tokens and of one
prefill  one prompt of 1,024 tokens and one new token: 1,024 over the time

Each engine runs in a process of its own, one after the other. Figures are medians over runs, tokens per second. "memory" is what one stream
could be at most: the weights of a token, at the speed at which our kernels read weights that no cache holds. Without `--model` a
checkpoint of seeded random weights is written first; with it, one folder is given for each dtype. llama.cpp needs it converted (`--gguf`,
one for each dtype). The sizes are those of the released models where kernels are fixed to them: latent 512 + 64, heads of 128 + 64.
"""

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "first_k_dense_replace": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 32,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 256, "moe_layer_freq": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096, "vocab_size": 32000,
    "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
MEMORY_BYTES = 512 << 20  # more than any cache holds
WORKLOADS = ("batch", "single", "prefill")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Generate = Callable[[list[list[int]], int], None]  # prompts, new tokens of each


def write_model(folder: Path, dtype: str) -> None:
    """A checkpoint in the hub's layout. Both dtypes hold the same values, those of bfloat16."""
    import torch
    from safetensors.torch import save_file

    from deepserve.config import EngineArgs
    from deepserve.engine.engine import Engine, resolve

    (folder / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": dtype}))
    # One page is no use to anybody, and enough here.
    config = resolve(EngineArgs(model=str(folder), load_format="dummy", dtype="bfloat16", max_model_len=64, num_pages=1))
    weights = Engine(config).runner.model.weights()
    wide = getattr(torch, dtype)
    tensors = {w.name: w.target.reshape(w.shape).to(wide if w.target.dtype is torch.bfloat16 else w.target.dtype) for w in weights}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of_a_token() -> int:
    """Parameters that one token reads: embedding and cache are small beside them."""
    m = MODEL
    hidden, heads, latent, rope = m["hidden_size"], m["num_attention_heads"], m["kv_lora_rank"], m["qk_rope_head_dim"]
    down = hidden * (m["q_lora_rank"] + latent + rope)
    up = heads * (m["q_lora_rank"] * (m["qk_nope_head_dim"] + rope) + latent * (m["qk_nope_head_dim"] + m["v_head_dim"]))
    attention = down + up + heads * m["v_head_dim"] * hidden
    experts = (m["num_experts_per_tok"] + m["n_shared_experts"]) * 3 * hidden * m["moe_intermediate_size"]
    dense = m["first_k_dense_replace"]
    layers = m["num_hidden_layers"] * attention + dense * 3 * hidden * m["intermediate_size"] + (m["num_hidden_layers"] - dense) * experts
    return layers + hidden * m["vocab_size"]


def measure_memory(dtype: str, threads: int, runs: int) -> dict[str, list[float]]:
    """Tokens per second of one stream, were there nothing but to read its weights."""
    import torch

    from hw.select import open_backend

    native = open_backend("cpu", cpu_kernels="native", num_threads=threads)
    weight = native.runtime.empty((MEMORY_BYTES // (1024 * getattr(torch, dtype).itemsize), 1024), getattr(torch, dtype)).fill_(1)
    x = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    speeds = []
    for _ in range(10 * runs + 1):
        started = time.perf_counter()
        native.ops.linear(x, weight)
        speeds.append(weight.numel() / weights_of_a_token() / (time.perf_counter() - started))
    return {"single": speeds[1:]}


def open_ours(model: str, dtype: str, threads: int) -> Generate:
    from deepserve import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, num_threads=threads, max_model_len=2048, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 30)

    def generate(prompts: list[list[int]], num_new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == num_new for one in found)

    return generate


def open_transformers(model: str, dtype: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), experts_implementation="eager").eval()
    loaded.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], num_new: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, pad_token_id=2)
        assert found.shape == (len(prompts), len(prompts[0]) + num_new)

    return generate


def open_vllm(model: str, dtype: str, threads: int) -> Generate:
    from vllm import LLM, SamplingParams

    # Compiled: without that its rotation goes wrong for this architecture, and so do its tokens.
    llm = LLM(model=model, dtype=dtype, max_model_len=2048, max_num_seqs=16, enforce_eager=False, skip_tokenizer_init=True)

    def generate(prompts: list[list[int]], num_new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert all(len(one.outputs[0].token_ids) == num_new for one in found)

    return generate


def open_http(url: str) -> Generate:
    """A server of completions that takes token ids and `ignore_eos`."""

    def one(ids: list[int], num_new: int) -> None:
        body = {"model": "m", "prompt": ids, "max_tokens": num_new, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == num_new

    def generate(prompts: list[list[int]], num_new: int) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(one, prompts, [num_new] * len(prompts)))

    return generate


OPENERS = {"ours": open_ours, "transformers": open_transformers, "vllm": open_vllm}


def measure(generate: Generate, runs: int, clock: Callable[[], float], workloads: list[str]) -> dict[str, list[float]]:
    """Tokens per second of each run; the first one warms up and is left out."""
    rng = random.Random(0)

    def seconds(num_prompts: int, num_tokens: int, num_new: int) -> float:
        prompts = [[rng.randrange(16, MODEL["vocab_size"]) for _ in range(num_tokens)] for _ in range(num_prompts)]
        started = clock()
        generate(prompts, num_new)
        return clock() - started

    speeds: dict[str, list[float]] = {name: [] for name in workloads}
    for number in range(runs + 1):
        for name in workloads:
            if name == "batch":
                speed = 16 * 64 / seconds(16, 64, 64)
            elif name == "single":
                first = seconds(1, 64, 1)
                speed = 64 / max(seconds(1, 64, 65) - first, 1e-9)
            else:
                speed = 1024 / seconds(1, 1024, 1)
            if number:
                speeds[name].append(speed)
    return speeds


def in_process_of_its_own(engine: str, model: str, dtype: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Run this file again as a worker."""
    env = dict(os.environ, OMP_NUM_THREADS=str(args.threads), PYTHONPATH=str(ROOT))
    python = sys.executable
    if engine == "vllm":
        python = args.vllm_python
        del env["PYTHONPATH"]
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{args.threads - 1}", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    options = ["--threads", str(args.threads), "--runs", str(args.runs), "--clock", args.clock, "--only", *args.only]
    command = [python, __file__, "--worker", engine, "--model", model, "--dtype", dtype, *options]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def with_llama(gguf: str, args: argparse.Namespace) -> dict[str, list[float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--alias m -t {args.threads} -tb {args.threads} -c 32768 -np 16 --port {port} --no-webui --no-cache-prompt"
    server = subprocess.Popen([args.llama_server, "-m", gguf, *options.split()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None, f"llama-server ended with {server.returncode}"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.1)
        return measure(open_http(url), args.runs, CLOCKS["wall"], args.only)
    finally:
        server.terminate()
        server.wait()


def run_worker(args: argparse.Namespace) -> None:
    """One engine; the speeds are the last line of stdout."""
    if args.worker == "memory":
        found = measure_memory(args.dtype[0], args.threads, args.runs)
    else:
        found = measure(OPENERS[args.worker](args.model[0], args.dtype[0], args.threads), args.runs, CLOCKS[args.clock], args.only)
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of some engines keep the interpreter alive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: seconds that the process computed; not for llama.cpp")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--llama-server", help="the program of llama.cpp")
    parser.add_argument("--gguf", nargs="+", default=[])
    parser.add_argument("--model", nargs="+", default=[])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=[*OPENERS, "memory"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return run_worker(args)
    wanted = {"memory": "single" in args.only, "ours": True, "transformers": args.transformers, "vllm": args.vllm_python}
    engines = [name for name, is_wanted in {**wanted, "llama.cpp": args.llama_server}.items() if is_wanted]
    print(f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, {args.clock} time, median of {args.runs}; ", end="")
    print(f"load average {os.getloadavg()[0]:.1f} at the start\n{'tokens/s':<24}" + "".join(f"{name:>10}" for name in args.only))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for i, dtype in enumerate(args.dtype):
            model = Path(args.model[i] if args.model else Path(scratch) / dtype)
            if not args.model:
                model.mkdir()
                write_model(model, dtype)
            for engine in engines:
                found = with_llama(args.gguf[i], args) if engine == "llama.cpp" else in_process_of_its_own(engine, str(model), dtype, args)
                cells = "".join(f"{statistics.median(found[name]):>10.1f}" if name in found else f"{'':>10}" for name in args.only)
                print(f"{engine + ', ' + dtype:<24}{cells}", flush=True)
                rows.append({"engine": engine, "dtype": dtype, "speeds": found, "load_average": os.getloadavg()[0]})
    print(f"load average {os.getloadavg()[0]:.1f} at the end")
    if args.json:
        found = {"cores": os.cpu_count(), "threads": args.threads, "clock": args.clock, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
