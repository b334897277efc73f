"""How long it takes to compile all kernels that DeepSeek-V3's products may need, and to find in a later start that none is lacking.

    PYTHONPATH=. python bench/gpu/compile_ahead.py [--max-num-batched-tokens 2048] [--folder DIR] [--json FILE]

The shapes are those of one GPU with 8 routed experts (`decode_slice.py`); no weights are made. Without `--folder` the kernels go to an
empty one, so all are compiled; several processes do it, one for each core. Nothing else should run on the machine. DG_JIT_USE_NVRTC=1 makes
DeepGEMM compile with NVRTC instead of nvcc. Beside it: what some products take with these kernels, in a graph.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from decode_slice import v3

from deepserve.config import EngineArgs
from deepserve.engine.engine import build_model, resolve
from deepserve.model.products import model_shapes
from hw.api import Ops
from hw.cuda.quantize import quantize
from hw.quant import QuantTensor
from hw.rules import ModelShapes
from hw.select import open_backend

PRODUCTS = ((128, 7168, 16384), (256, 24576, 1536), (2048, 7168, 16384))  # rows, N, K
REPEATS = 20


def shapes_of(max_tokens: int, backend) -> ModelShapes:
    """Of an engine with four layers, two kinds of which there are."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(v3(4, 8, narrow=False)))
        args = EngineArgs(model=folder, device="cuda", load_format="dummy", max_num_batched_tokens=max_tokens)
        config = resolve(args)
    return model_shapes(config, build_model(config, backend, 0, torch.device("meta")))


def microseconds(ops: Ops, rows: int, outer: int, inner: int) -> float:
    """Of one product."""
    data = torch.randn(outer, inner, device="cuda").to(torch.float8_e4m3fn)
    weight = QuantTensor(data, torch.ones(-(-outer // 128), inner // 128, device="cuda"))
    x = quantize(torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16))
    ops.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            ops.linear(x, weight)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--folder", help="of kernels, which are kept")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        backend = open_backend("cuda", kernel_cache_dir=args.folder or empty)
        shapes = shapes_of(args.max_num_batched_tokens, backend)
        times = []
        for _ in range(2):
            started = time.perf_counter()
            backend.runtime.warm_up(shapes, True)
            times.append(time.perf_counter() - started)
        kernels = sum(1 for _ in Path(args.folder or empty, "deep_gemm", "cache").glob("kernel.*"))
        us = {f"{rows} x {outer} x {inner}": microseconds(backend.ops, rows, outer, inner) for rows, outer, inner in PRODUCTS}
    cores, card = len(os.sched_getaffinity(0)), torch.cuda.get_device_name()
    print(f"{card}, {cores} cores, steps of up to {args.max_num_batched_tokens} tokens: {times[0]:.1f} s, then {times[1] * 1e3:.1f} ms")
    print(f"{kernels} kernels in the folder; products, us: {', '.join(f'{name}: {took:.1f}' for name, took in us.items())}")
    if args.json:
        found = {"card": card, "cores": cores, "max_tokens": args.max_num_batched_tokens, "cold_s": times[0], "again_s": times[1]}
        args.json.write_text(json.dumps({**found, "kernels": kernels, "products_us": us}, indent=1))


if __name__ == "__main__":
    main()
