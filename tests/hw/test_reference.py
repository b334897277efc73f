"""The reference itself against independent truth: dense float64 formulas, plain loops, values worked out by hand."""

import numpy as np
import pytest
import torch

from hw import testing
from hw.api import ExpertRows, GateRule, PenaltyInputs, SampleInputs, Segments
from hw.cpu.reference.ops import ReferenceOps
from hw.quant import quantize_weight_blocks
from hw.testing import assert_close, tolerance

OPS = ReferenceOps()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert_close(actual, expected, tolerance(actual.dtype), what)


def softmax64(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attend64(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One query `[H, d]` over keys `[S, H, d]`, values `[S, H, v]`, head by head."""
    outs, lses = [], []
    for h in range(q.shape[0]):
        scores = keys[:, h].double().numpy() @ q[h].double().numpy() * scale
        outs.append(softmax64(scores) @ values[:, h].double().numpy())
        lses.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max())
    return torch.from_numpy(np.stack(outs)), torch.from_numpy(np.stack(lses))


@DTYPES
def test_rms_norm(dtype: torch.dtype):
    x, weight = (torch.randn(6, 50) * 3).to(dtype), torch.randn(50).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-2).sqrt() * weight.double()
    close(OPS.rms_norm(x, weight, 1e-2), expected, "rms_norm")


@DTYPES
def test_add_rms_norm_rounds_the_sum_once(dtype: torch.dtype):
    x, residual, weight = (torch.randn(6, 50).to(dtype) for _ in range(3))
    normed, total = OPS.add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    assert torch.equal(normed.rows(quantized=False), OPS.rms_norm(total, weight[0], 1e-6))


@DTYPES
def test_rope_is_a_product_of_complex_numbers(dtype: torch.dtype):
    x, positions = torch.randn(5, 3, 8).to(dtype), torch.tensor([0, 1, 17, 300, 17])
    angles = torch.outer(torch.arange(301, dtype=torch.float64), 50.0 ** -(torch.arange(0, 8, 2) / 8))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    pairs = torch.view_as_complex(x.double().view(5, 3, 4, 2))
    turned = pairs * torch.polar(torch.ones(5, 4, dtype=torch.float64), angles[positions])[:, None]
    close(OPS.rope(x, positions, table), torch.view_as_real(turned).flatten(-2), "rope")


@DTYPES
def test_silu_mul(dtype: torch.dtype):
    gate_up = torch.randn(4, 14).to(dtype) * 4
    gate, up = gate_up.double().split(7, dim=-1)
    close(OPS.silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, "silu_mul")


@DTYPES
def test_products(dtype: torch.dtype):
    x, w = torch.randn(5, 40).to(dtype), (torch.randn(7, 40) / 6).to(dtype)
    close(OPS.linear(x, w), torch.from_numpy(np.einsum("tk,nk->tn", x.double().numpy(), w.double().numpy())), "linear")
    x, w = torch.randn(5, 3, 40).to(dtype), (torch.randn(3, 40, 6) / 6).to(dtype)
    expected = torch.stack([x[:, h].double() @ w[h].double() for h in range(3)], dim=1)
    close(OPS.head_matmul(x, w), expected, "head_matmul")


def test_a_quantised_weight_multiplies_by_its_blocks_scales():
    x, w = torch.randn(3, 200), torch.randn(150, 200) / 14
    w[128:, 128:] *= 50
    quant = quantize_weight_blocks(w)
    dense = quant.data.double()
    for i in range(2):
        for j in range(2):
            dense[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= quant.scale[i, j].double()
    close(OPS.linear(x, quant), x.double() @ dense.T, "linear fp8")


def test_latent_write_puts_normed_latent_and_rotated_key_in_their_slots():
    kv, norm = torch.randn(4, 12), torch.randn(8)
    table = torch.cat((torch.tensor([[0.6, -0.8]]), torch.tensor([[0.8, 0.6]])), dim=-1).repeat(9, 1)  # [9, 4]: cos | sin
    cache = torch.zeros(3, 2, 12)
    slots = torch.tensor([5, -1, 0, 3])
    _, latent, key = OPS.latent_write(kv, None, norm, 1e-6, torch.tensor([0, 3, 8, 1]), table, cache, slots)
    a, b, c, d = kv[:, 8:].T
    rotated = torch.stack((0.6 * a - 0.8 * b, 0.6 * b + 0.8 * a, -0.8 * c - 0.6 * d, -0.8 * d + 0.6 * c), dim=-1)
    close(key, rotated, "key")
    close(latent, kv[:, :8] / kv[:, :8].square().mean(-1, keepdim=True).sqrt() * norm, "latent")
    entries = torch.cat((latent, key), dim=-1)
    assert torch.equal(cache[2, 1], entries[0])
    assert torch.equal(cache[0, 0], entries[2])
    assert torch.equal(cache[1, 1], entries[3])
    assert not cache[0, 1].any() and not cache[1, 0].any() and not cache[2, 0].any()


def test_latent_gather_reads_tokens_in_order():
    cache = torch.arange(12.0).view(6, 2, 1)  # slot s holds the number s
    page_table = torch.tensor([[4, 0, 2], [1, -1, -1]], dtype=torch.int32)
    assert OPS.latent_gather(cache, page_table, [1, 0], [4, 2]).flatten().tolist() == [9, 0, 1, 4, 2, 3]
    assert OPS.latent_gather(cache, page_table, [2, 0], [1, 0]).flatten().tolist() == [0]


@DTYPES
@pytest.mark.parametrize("case", [case for case in testing.decode_cases() if sum(case.seq_lens) < 400], ids=lambda case: case.id)
def test_mla_decode(case: testing.DecodeCase, dtype: torch.dtype):
    num_seqs, dim, size = len(case.seq_lens), case.latent + case.rope, case.page_size
    max_pages = -(-max(case.seq_lens, default=0) // size) + 1
    cache = torch.randn(num_seqs * max_pages + 1, size, dim).to(dtype)
    page_table = torch.randperm(num_seqs * max_pages).view(num_seqs, max_pages).int()
    q = torch.randn(num_seqs, case.query_len, case.num_heads, dim).to(dtype)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    out, lse = OPS.mla_decode(q, cache, page_table, lens, max(case.seq_lens, default=0), case.latent, 0.2, with_lse=True)
    for i, seq_len in enumerate(case.seq_lens):
        if not seq_len:
            assert not out[i].any() and (lse[i] == -torch.inf).all()
            continue
        tokens = torch.cat([cache[page] for page in page_table[i].tolist()])[:seq_len, None].expand(-1, case.num_heads, -1)
        for j in range(case.query_len):
            seen = tokens[: seq_len - (case.query_len - 1 - j)]  # the last query sees all, the one before all but one
            expected_out, expected_lse = attend64(q[i, j], seen, seen[..., : case.latent], 0.2)
            close(out[i, j], expected_out, f"out of sequence {i}, query {j}")
            close(lse[i, j], expected_lse, f"lse of sequence {i}, query {j}")


@DTYPES
@pytest.mark.parametrize("case", [case for case in testing.prefill_cases() if case.id != "long"], ids=lambda case: case.id)
def test_mla_prefill(case: testing.PrefillCase, dtype: torch.dtype):
    q = torch.randn(sum(case.query_lens), case.num_heads, case.key_dim).to(dtype)
    k = torch.randn(sum(case.key_lens), case.num_heads, case.key_dim).to(dtype)
    v = torch.randn(sum(case.key_lens), case.num_heads, case.value_dim).to(dtype)
    unused = torch.zeros(0, dtype=torch.int32)
    segments = Segments(list(case.query_lens), unused), Segments(list(case.key_lens), unused)
    out, lse = OPS.mla_prefill(q, k, v, *segments, 0.3, case.causal)
    row = first_key = 0
    for query_len, key_len in zip(case.query_lens, case.key_lens, strict=True):
        for j in range(query_len):
            seen = slice(first_key, first_key + (key_len - (query_len - 1 - j) if case.causal else key_len))
            if seen.stop <= seen.start:
                assert not out[row].any() and (lse[row] == -torch.inf).all()
            else:
                expected_out, expected_lse = attend64(q[row], k[seen], v[seen], 0.3)
                close(out[row], expected_out, f"out of row {row}")
                close(lse[row], expected_lse, f"lse of row {row}")
            row += 1
        first_key += key_len


def test_merged_parts_equal_attention_over_the_union():
    q, k, v = torch.randn(4, 2, 8) * 3, torch.randn(30, 2, 8), torch.randn(30, 2, 5)
    unused = torch.zeros(0, dtype=torch.int32)

    def over(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        lens = len(range(30)[keys])
        return OPS.mla_prefill(q, k[keys], v[keys], Segments([4], unused), Segments([lens], unused), 1.0, False)

    whole = over(slice(None))
    for cut in (0, 1, 17, 30):
        out, lse = OPS.merge_attention(*over(slice(cut)), *over(slice(cut, None)))
        close(out, whole[0], f"out cut at {cut}")
        close(lse, whole[1], f"lse cut at {cut}")


def gate_by_loops(logits: np.ndarray, bias: np.ndarray | None, rule: GateRule) -> tuple[list[int], list[float]]:
    """One token. Python's sort is stable, so equal scores leave the lower id first."""
    exact = logits.astype(np.float64)
    scores = softmax64(exact) if rule.scoring == "softmax" else 1 / (1 + np.exp(-exact))
    choice = scores if bias is None else scores + bias
    size = len(scores) // rule.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(rule.num_groups)]

    def group_score(group: list[int]) -> float:
        best = sorted((choice[e] for e in group), reverse=True)
        return best[0] if rule.group_score == "max" else sum(best[:2])

    kept = sorted(groups, key=group_score, reverse=True)[: rule.topk_groups if rule.num_groups > 1 else None]
    chosen = sorted(sorted(e for group in kept for e in group), key=lambda e: choice[e], reverse=True)[: rule.top_k]
    total = sum(scores[e] for e in chosen) + 1e-20 if rule.normalize else 1.0
    return chosen, [scores[e] / total * rule.scaling for e in chosen]


@pytest.mark.parametrize("case", testing.gate_cases(), ids=lambda case: case.id)
def test_gate_topk(case: testing.GateCase):
    logits = torch.randn(case.num_tokens, case.num_experts)
    bias = None if case.bias is None else torch.randn(case.num_experts) * case.bias
    if case.ties:
        # Scores of 0.5 and 0 and a whole-numbered bias: what ties in fp32 ties in float64, sums of two included.
        logits, bias = torch.where(logits > 0, 0.0, -200.0), None if bias is None else bias.round()
    rule = GateRule(case.top_k, case.scoring, case.num_groups, case.topk_groups, case.group_score, case.normalize, case.scaling)
    idx, _, weight = OPS.gate_topk(logits, bias, rule, testing.replicas(logits.shape[1]))
    assert idx.shape == weight.shape == (case.num_tokens, case.top_k)
    for token in range(case.num_tokens):
        chosen, weights = gate_by_loops(logits[token].numpy(), None if bias is None else bias.numpy().astype(np.float64), rule)
        assert idx[token].tolist() == chosen, f"token {token}"
        close(weight[token], torch.tensor(weights, dtype=torch.float64), f"weights of token {token}")


def test_a_gate_by_hand():
    # Sigmoid scores (.5, .5, .5, .9 | .6, .6, .1, .1); the bias lifts expert 0 and sinks 3, and must not touch the weights.
    logits = torch.logit(torch.tensor([[0.5, 0.5, 0.5, 0.9, 0.6, 0.6, 0.1, 0.1]]))
    bias = torch.tensor([0.3, 0.0, 0.0, -2.0, 0.0, 0.0, 0.0, 0.0])
    rule = GateRule(2, "sigmoid", 2, 1, "top2_sum", True, 2.0)
    idx, _, weight = OPS.gate_topk(logits, bias, rule, testing.replicas(logits.shape[1]))
    assert idx.tolist() == [[0, 1]]  # .8 + .5 beats .6 + .6; among equals the lowest id
    close(weight, torch.tensor([[1.0, 1.0]]), "weights")
    # By its best expert alone the first group wins too; without bias the second expert of group 1 counts: .6 < .9.
    idx, _, weight = OPS.gate_topk(logits, None, GateRule(3, "sigmoid", 2, 1, "max", False, 1.0), testing.replicas(8))
    assert idx.tolist() == [[3, 0, 1]]
    close(weight, torch.tensor([[0.9, 0.5, 0.5]]), "weights")


def test_experts_below_zero_are_chosen_only_inside_their_groups():
    # All choices of the kept group are negative; a mask of 0.0 instead of -inf would let other groups in.
    logits, bias = torch.zeros(1, 4), torch.tensor([-1.0, -1.1, -3.0, -3.0])
    idx, *_ = OPS.gate_topk(logits, bias, GateRule(2, "sigmoid", 2, 1, "top2_sum", True, 1.0), testing.replicas(4))
    assert idx.tolist() == [[0, 1]]


@DTYPES
def test_grouped_products_are_one_product_per_expert(dtype: torch.dtype):
    x, w, counts = torch.randn(9, 16).to(dtype), torch.randn(4, 5, 16).to(dtype), [2, 0, 6, 1]
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    expected = torch.stack([w[e].double() @ row.double() for e, row in zip(experts, x, strict=True)])
    close(OPS.grouped_linear(x, w, ExpertRows(counts)), expected, "grouped_linear")
    masked = torch.randn(4, 6, 16).to(dtype)
    masked[2] = x[2:8]
    close(OPS.grouped_linear_masked(masked, w, torch.tensor(counts))[2], expected[2:8], "grouped_linear_masked")


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0], [7.0, 7.0, 7.0, 7.0, 7.0]])
    inputs = PenaltyInputs(
        rows=torch.tensor([0]),
        prompt_mask=torch.tensor([[True, True, False, False, False]]),
        output_counts=torch.tensor([[0.0, 0.0, 3.0, 1.0, 0.0]]),
        presence=torch.tensor([0.5]),
        frequency=torch.tensor([0.25]),
        repetition=torch.tensor([2.0]),
    )
    OPS.penalize(logits, inputs)
    # Repetition touches prompt and output, the other two the output only: 2/2 - .25*3 - .5, -2*2 - .25 - .5.
    assert logits.tolist() == [[1.0, -4.0, -0.25, -4.75, 1.0], [7.0] * 5]


def test_logprobs():
    logits = torch.randn(5, 40) * 3
    tokens = torch.tensor([0, 39, 7, 7, 20])
    result = OPS.logprobs(logits, tokens, 4)
    exact = torch.from_numpy(np.log(softmax64(logits.double().numpy())))
    for row, token in enumerate(tokens.tolist()):
        close(result.token[row], exact[row, token], "token")
        assert result.rank[row] == 1 + sum(exact[row] > exact[row, token])
        order = exact[row].argsort(descending=True)[:4]
        assert torch.equal(result.top_ids[row], order)
        close(result.top[row], exact[row, order], "top")


def test_the_best_do_not_depend_on_how_many_are_wanted():
    """As in company: of equal logits, which are many in bfloat16, the lower token comes first."""
    logits = (torch.randn(6, 4000) * 3).bfloat16().float()
    order = logits.sort(descending=True, stable=True).indices
    for num in (0, 1, 2, 5, 40, 300, 4000):
        assert torch.equal(OPS.logprobs(logits, torch.arange(6), num).top_ids, order[:, :num]), num


def test_greedy_takes_the_highest_and_of_equals_the_first():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -8.0, -7.0, -6.0]])
    ones, none = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    inputs = SampleInputs(0 * ones, none, ones, 0 * ones, none, none, none, any_sampled=False, any_filtered=False)
    assert OPS.sample(logits, inputs).tolist() == [1, 0, 3]
