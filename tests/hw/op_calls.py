"""Calls of every op on small and odd inputs: `TABLE[op](dtype)` yields their names and arguments."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hw import testing
from hw.api import ExpertRows, GateRule, LatentDims, PenaltyInputs, Rows, SampleInputs, Segments
from hw.quant import QuantTensor, quantize_activation, quantize_weight_blocks


@dataclass(frozen=True)
class Call:
    """One call of an op. `changes` are the arguments it may write to; `real` cuts what the contract leaves open out of the result."""

    args: tuple[Any, ...]
    changes: tuple[int, ...] = ()
    real: Callable[[Any], Any] = lambda result: result


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def weight(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)


def segments(lens: tuple[int, ...]) -> Segments:
    return Segments(list(lens), torch.tensor([0, *lens]).cumsum(0).int())


def table(positions: int, rope: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 100.0 ** -(torch.arange(0, rope, 2) / rope))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def pages(lens: tuple[int, ...], page_size: int, entry: int, spare: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache full of numbers and a table that scatters the sequences over it; columns that a sequence does not need are -1."""
    needed = [-(-length // page_size) for length in lens]
    num_pages = sum(needed) + 3
    page_table = torch.full((len(lens), max(needed, default=0) + spare), -1, dtype=torch.int32)
    free = torch.randperm(num_pages).int()
    for row, (first, count) in enumerate(zip(torch.tensor([0, *needed]).cumsum(0).tolist(), needed, strict=False)):
        page_table[row, :count] = free[first : first + count]
    return normal(num_pages, page_size, entry, dtype=dtype), page_table


def real_rows(rows: Rows, counts: torch.Tensor) -> tuple[Any, ...]:
    """Shape, and what the masked layout means."""
    real = (torch.arange(rows.shape[1]) < counts[:, None]).to(rows.data.device)
    if isinstance(rows, QuantTensor):
        return rows.shape, rows.data.view(torch.uint8)[real].view(rows.data.dtype), rows.scale[real].bfloat16()
    return rows.shape, rows[real]


def spread(counts: tuple[int, ...], align: int, x: torch.Tensor) -> tuple[ExpertRows, torch.Tensor]:
    """x as expert-sorted rows whose gaps hold 1e9."""
    layout = ExpertRows(list(counts), align)
    experts, rows = torch.full((layout.starts[-1],), -1, dtype=torch.int32), x.new_full((layout.starts[-1], x.shape[1]), 1e9)
    for e, (first, part) in enumerate(zip(layout.starts, x.split(counts), strict=False)):
        rows[first : first + len(part)], experts[first : first + len(part)] = part, e
    return dataclasses.replace(layout, experts=experts), rows


def between(rows: torch.Tensor, layout: ExpertRows) -> torch.Tensor:
    """Rows that are not gaps."""
    return torch.cat([rows[first : first + count] for first, count in zip(layout.starts, layout.counts, strict=False)])


def rms_norm(dtype) -> Iterator[tuple[str, Call]]:
    for case in testing.row_cases():
        yield case.id, Call((normal(case.num_rows, case.width, dtype=dtype), normal(case.width, dtype=dtype), 1e-6))
    yield "tiny-values", Call((normal(4, 32, dtype=dtype) * 1e-4, normal(32, dtype=dtype), 1e-5))


def add_rms_norm(dtype):
    for case in testing.row_cases():
        x, residual = (normal(case.num_rows, case.width, dtype=dtype) for _ in range(2))
        yield case.id, Call((x, residual, normal(case.width, dtype=dtype), 1e-6))
    for num_rows, width in ((0, 128), (1, 128), (5, 384), (9, 1536)):
        for dense in (True, False):
            x, residual = (normal(num_rows, width, dtype=dtype) for _ in range(2))
            args = (x, residual, normal(width, dtype=dtype), 1e-6, dense, True)
            yield f"{num_rows}-by-{width}-quantised{'-too' * dense}", Call(args)


def rope(dtype):
    for case in testing.row_cases():
        positions = torch.randint(0, 500, (case.num_rows,))
        yield case.id, Call((normal(case.num_rows, 3, 10, dtype=dtype), positions, table(500, 10)))
    # The layer rotates a slice of a wider tensor, where it lies.
    positions = torch.tensor([0, 1, 499, 7, 7])
    yield "a-view", Call((normal(5, 3, 24, dtype=dtype)[..., 16:], positions, table(500, 8)))
    out = normal(5, 3, 9, dtype=dtype)[..., 1:]
    yield "into-another-view", Call((normal(5, 3, 24, dtype=dtype)[..., 16:], positions, table(500, 8), out), changes=(3,))


def silu_mul(dtype):
    for case in testing.row_cases():
        yield case.id, Call((normal(case.num_rows, 2 * case.width, dtype=dtype),))
    for num_rows, width in ((0, 128), (1, 128), (7, 384), (3, 2176)):
        yield f"{num_rows}-by-{width}-quantised", Call((normal(num_rows, 2 * width, dtype=dtype), True))
    for case in testing.grouped_cases():
        counts = torch.tensor(case.counts, dtype=torch.int32)
        x = normal(len(case.counts), case.capacity, 256, dtype=dtype)
        for quant in (False, True):
            args = (x, quant, counts)
            yield f"{case.id}-masked{'-quantised' * quant}", Call(args, real=lambda y, counts=counts: real_rows(y, counts))


def linear(dtype):
    for case in testing.row_cases():
        x, w = normal(case.num_rows, case.width, dtype=dtype), weight(19, case.width, dtype=dtype)
        yield case.id, Call((x, w))
        yield f"{case.id}-fp8", Call((x, quantize_weight_blocks(w)))
    yield "a-view", Call((normal(18, 40, dtype=dtype)[:, 8:], weight(50, 32, dtype=dtype)[20:]))
    for num_rows in (0, 1, 17):
        x, w = quantize_activation(normal(num_rows, 256, dtype=torch.bfloat16)), weight(48, 256, dtype=torch.bfloat16)
        yield f"{num_rows}-quantised-rows", Call((x, w))
        yield f"{num_rows}-quantised-rows-fp8", Call((x, quantize_weight_blocks(w)))


def quantizes(dtype):
    yield "a-dense-weight", Call((weight(128, 128, dtype=dtype), dtype))


def absorb_query(dtype):
    for num_tokens, num_heads, nope, rope_dim, latent in ((0, 2, 8, 4, 12), (1, 1, 16, 6, 13), (7, 3, 11, 8, 40), (33, 2, 128, 64, 512)):
        kv_up = weight(num_heads, nope + 5, latent, dtype=dtype)
        q, positions = normal(num_tokens, num_heads, nope + rope_dim, dtype=dtype), torch.randint(0, 300, (num_tokens,))
        yield f"{num_tokens}-tokens", Call((q, positions, table(300, rope_dim), kv_up[:, :nope]))


def unabsorb(dtype):
    for num_tokens, num_heads, value, latent in ((0, 2, 128, 12), (1, 1, 128, 13), (7, 3, 11, 40), (33, 2, 128, 512), (5, 4, 32, 64)):
        kv_up = weight(num_heads, 7 + value, latent, dtype=dtype)
        out = normal(num_tokens, num_heads, latent, dtype=dtype)
        yield f"{num_tokens}-tokens", Call((out, kv_up[:, 7:]))
        if num_heads * value % 128 == 0:
            yield f"{num_tokens}-tokens-quantised", Call((out, kv_up[:, 7:], True))


def expand_latent(dtype):
    for num_tokens, num_heads, nope, rope_dim, value, latent in ((0, 2, 8, 4, 6, 12), (1, 1, 16, 6, 5, 13), (33, 3, 128, 64, 128, 512)):
        entries = normal(num_tokens, latent + rope_dim, dtype=dtype)
        kv_up = weight(num_heads, nope + value, latent, dtype=dtype)
        yield f"{num_tokens}-tokens", Call((entries[:, :latent], entries[:, latent:], kv_up, nope))


def latent_write(dtype):
    latent, key, page_size, num_pages = 24, 8, 8, 6
    slots = {
        "no-rows": [],
        "page-borders": [7, 8, 15, 16, 47],
        "some-not-written": [-1, 3, -1, 40, 0],
        "nothing-written": [-1, -1],
        "scattered": torch.randperm(num_pages * page_size)[:21].tolist(),
    }
    for name, places in slots.items():
        num_rows = len(places)
        norm = normal(latent, dtype=dtype)
        cache = normal(num_pages, page_size, latent + key, dtype=dtype)
        args = (norm, 1e-6, torch.randint(0, 99, (num_rows,)), table(99, key), cache, torch.tensor(places, dtype=torch.int64))
        yield name, Call((normal(num_rows, latent + key, dtype=dtype), None, *args), changes=(6,))
        for q_rank, quant in ((13, False), (384, True)):
            down = normal(num_rows, q_rank + latent + key, dtype=dtype)
            yield (
                f"{name}-with-query{'-quantised' * quant}",
                Call((down, normal(q_rank, dtype=dtype), *args, quant), changes=(6,)),
            )


def latent_gather(dtype):
    for case in testing.gather_cases():
        ends = tuple(first + length for first, length in zip(case.first, case.lens, strict=True))
        cache, page_table = pages(ends, case.page_size, 12, 1, dtype)
        yield case.id, Call((cache, page_table, list(case.first), list(case.lens)))


def mla_decode(dtype):
    for case in testing.decode_cases():
        dim, longest = case.latent + case.rope, max(case.seq_lens, default=0)
        cache, page_table = pages(case.seq_lens, case.page_size, dim, case.spare_pages, dtype)
        q = normal(len(case.seq_lens), case.query_len, case.num_heads, dim, dtype=dtype)
        lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        args = (q, cache, page_table, lens)
        yield case.id, Call((*args, longest, case.latent, dim**-0.5, None, True))
        yield f"{case.id}-without-lse", Call((*args, longest, case.latent, dim**-0.5))
        # The host's bound may be higher than the truth.
        yield f"{case.id}-loose-bound", Call((*args, longest + 3 * case.page_size, case.latent, dim**-0.5, None, True))


def mla_prefill(dtype):
    for case in testing.prefill_cases():
        q = normal(sum(case.query_lens), case.num_heads, case.key_dim, dtype=dtype)
        k = normal(sum(case.key_lens), case.num_heads, case.key_dim, dtype=dtype)
        v = normal(sum(case.key_lens), case.num_heads, case.value_dim, dtype=dtype)
        yield case.id, Call((q, k, v, segments(case.query_lens), segments(case.key_lens), case.key_dim**-0.5, case.causal))


def merge_attention(dtype):
    for case in testing.row_cases():
        outs = [normal(case.num_rows, 3, 8, dtype=dtype) for _ in range(2)]
        lses = [normal(case.num_rows, 3, dtype=torch.float32) * 20 for _ in range(2)]
        yield case.id, Call((outs[0], lses[0], outs[1], lses[1]))
    # [first set empty, second, both]
    lse_a, lse_b = torch.tensor([[-torch.inf, 2.0, -torch.inf]]).T, torch.tensor([[1.0, -torch.inf, -torch.inf]]).T
    empty_a, empty_b = lse_a.isinf()[..., None], lse_b.isinf()[..., None]
    outs = [normal(3, 1, 8, dtype=dtype).masked_fill(empty, 0.0) for empty in (empty_a, empty_b)]
    yield "empty-sets", Call((outs[0], lse_a, outs[1], lse_b))


def prefers_absorbed(dtype):
    for query_len, context_len in ((1, 0), (1, 5000), (4096, 100)):
        # Which form is cheaper is the backend's own matter.
        yield f"{query_len}-behind-{context_len}", Call((query_len, context_len, LatentDims(512, 128, 64, 128)), real=type)


def gate_logits(dtype):
    for case in testing.row_cases():
        yield case.id, Call((normal(case.num_rows, case.width, dtype=dtype), weight(19, case.width, dtype=torch.float32)))


def gate_topk(dtype):
    for case in testing.gate_cases():
        logits = torch.randn(case.num_tokens, case.num_experts)
        bias = None if case.bias is None else torch.randn(case.num_experts) * case.bias
        if case.ties:
            logits, bias = logits.round(), None if bias is None else bias.round()
        rule = GateRule(
            case.top_k, case.scoring, case.num_groups, case.topk_groups, case.group_score, case.normalize, case.scaling
        )  # fmt: skip
        for most in (1, 3):
            yield f"{case.id}-{most}-replicas", Call((logits, bias, rule, testing.replicas(case.num_experts, most)))


def grouped_linear(dtype):
    for case in testing.grouped_cases():
        x = normal(sum(case.counts), case.inner, dtype=dtype)
        w = weight(len(case.counts), case.outer, case.inner, dtype=dtype)
        layout = ExpertRows(list(case.counts))
        yield case.id, Call((x, w, layout))
        yield f"{case.id}-fp8", Call((x, quantize_weight_blocks(w, (16, 128)), layout))
        for align in (4, 128):
            layout, rows = spread(case.counts, align, x)
            yield f"{case.id}-spread-over-{align}", Call((rows, w, layout), real=lambda y, layout=layout: (y.shape, between(y, layout)))


def grouped_linear_masked(dtype):
    for case in testing.grouped_cases():
        num_experts, counts = len(case.counts), torch.tensor(case.counts, dtype=torch.int32)
        x = normal(num_experts, case.capacity, case.inner, dtype=dtype)
        w = weight(num_experts, case.outer, case.inner, dtype=dtype)

        def cut(result: torch.Tensor, counts: torch.Tensor = counts) -> tuple[torch.Size, torch.Tensor]:
            return real_rows(result, counts)

        yield case.id, Call((x, w, counts), real=cut)
        yield f"{case.id}-fp8", Call((x, quantize_weight_blocks(w, (16, 128)), counts), real=cut)


def fuses_experts(dtype):
    yield "fp32", Call((1, 2, weight(4, 256, 128, dtype=torch.float32), torch.float32))


# Tokens, experts, experts of a token, inner and hidden channels.
FUSED = ((0, 3, 2, 128, 128), (1, 3, 3, 64, 128), (3, 5, 2, 192, 512), (2, 9, 8, 128, 1152))


def some_experts(num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].contiguous()


def fused_gate_up(dtype):
    for num_tokens, num_experts, top_k, inner, hidden in FUSED:
        args = normal(num_tokens, hidden, dtype=dtype), some_experts(num_tokens, num_experts, top_k)
        yield f"{num_tokens}-of-{num_experts}", Call((*args, weight(num_experts, 2 * inner, hidden, dtype=dtype)))


def fused_down(dtype):
    for num_tokens, num_experts, top_k, inner, hidden in FUSED:
        args = normal(num_tokens, top_k, inner, dtype=dtype), some_experts(num_tokens, num_experts, top_k), torch.rand(num_tokens, top_k)
        for shared in (None, normal(num_tokens, hidden, dtype=dtype)):
            yield f"{num_tokens}-of-{num_experts}", Call((*args, weight(num_experts, hidden, inner, dtype=dtype), shared))


def penalize(dtype):
    for case in testing.sample_cases():
        rows = torch.randperm(case.num_rows)[: case.num_rows // 2 + 1]
        num, vocab = rows.numel(), case.vocab_size
        counts = torch.randint(-3, 4, (num, vocab)).clamp(min=0).float()
        factors = torch.rand(num), torch.randn(num), torch.rand(num) + 0.5
        inputs = PenaltyInputs(rows, torch.rand(num, vocab) < 0.2, counts, *factors)
        yield case.id, Call((torch.randn(case.num_rows, vocab) * 3, inputs), changes=(0,))


def sample(dtype):
    for case in testing.sample_cases():
        num = case.num_rows

        def some(values: torch.Tensor, off: float) -> torch.Tensor:
            return torch.where(torch.rand(len(values)) < 0.6, values, off)

        temperature = some(torch.rand(num) + 0.3, 0.0) if case.sampled else torch.zeros(num)
        top_k, top_p, min_p = torch.zeros(num, dtype=torch.int64), torch.ones(num), torch.zeros(num)
        if case.filtered:
            top_k = some(torch.randint(1, 2 * case.vocab_size, (num,)), 0).long()
            top_p, min_p = some(torch.rand(num), 1.0), some(torch.rand(num) * 0.2, 0.0)
            top_p[: num // 8] = 1e-20
        seed = torch.randint(-(2**62), 2**62, (num,))
        keys = (seed, torch.randint(0, 8, (num,)), torch.randint(0, 100_000, (num,)))
        inputs = SampleInputs(temperature, top_k, top_p, min_p, *keys, case.sampled, case.filtered)
        # Half-integer logits: ties at the borders of the filters.
        yield case.id, Call(((torch.randn(num, case.vocab_size) * 6).round() / 2, inputs))
    yield from filter_borders()


def filter_borders() -> Iterator[tuple[str, Call]]:
    """Rows of one kind each, with every filter alone and all together."""
    vocab = 700
    only_one, few = torch.full((vocab,), -torch.inf), torch.full((vocab,), -torch.inf)
    only_one[77] = 3.0
    few[[5, 350, 699]] = torch.tensor([2.5, 3.0, 2.5])
    rows = {
        "spread": torch.randn(vocab) * 3,
        "peaked": torch.randn(vocab) * 30,
        "nearly-flat": torch.randn(vocab) * 0.1 - 5,
        "flat": torch.zeros(vocab),
        "one-finite": only_one,
        "three-finite": few,
    }
    # [temperature, top_k, top_p, min_p]
    settings = [
        (1.0, 700, 1.0, 0.0), (1.0, 699, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (0.02, 50, 0.9, 0.0), (1.5, 0, 0.999, 0.01),
        (1.0, 0, 1e-6, 0.0), (1.0, 0, 1.0, 1.0), (0.7, 40, 0.95, 0.05), (0.0, 40, 0.5, 0.5),
    ]  # fmt: skip
    for name, logits in rows.items():
        temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
        num = len(settings)
        keys = torch.arange(num) * 7919 - 3, torch.arange(num) % 2, torch.arange(num) + 40
        inputs = SampleInputs(temperature, top_k, top_p, min_p, *keys, True, True)
        yield name, Call((logits.expand(num, -1).contiguous(), inputs))


def logprobs(dtype):
    for case in testing.sample_cases():
        logits = torch.randn(case.num_rows, case.vocab_size) * 4
        for num_top in (0, 1, 5):
            yield f"{case.id}-{num_top}", Call((logits, torch.randint(0, case.vocab_size, (case.num_rows,)), num_top))


TABLE: dict[str, Callable[[torch.dtype], Iterator[tuple[str, Call]]]] = {
    make.__name__: make
    for make in (
        rms_norm, add_rms_norm, rope, silu_mul, quantizes, linear, absorb_query, unabsorb, expand_latent,
        latent_write, latent_gather, mla_decode, mla_prefill, merge_attention,
        prefers_absorbed, gate_logits, gate_topk, grouped_linear, grouped_linear_masked, fuses_experts, fused_gate_up, fused_down, penalize,
        sample, logprobs,
    )
}  # fmt: skip
WITHOUT_NUMBERS = {"decode_plan"}  # its object goes back into mla_decode; test_cuda holds that sharing one changes nothing
FP32_ONLY = {"prefers_absorbed", "fuses_experts", "gate_topk", "penalize", "sample", "logprobs"}
BF16_ONLY = {"fused_gate_up", "fused_down"}  # `fuses_experts` never says otherwise


def skips(op: str, dtype: torch.dtype) -> bool:
    """Whether the op is not there for activations of this dtype, or the same for all."""
    return op in (BF16_ONLY if dtype == torch.float32 else FP32_ONLY)
