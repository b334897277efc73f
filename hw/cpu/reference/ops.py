"""Plain twins of every compute primitive of `hw.api.Ops`."""

import torch

from hw.api import Activation, ExpertRows, GateRule, Logprobs, Matrix, PenaltyInputs, Replicas, Rows, SampleInputs, Segments
from hw.cpu.reference.philox import gumbel_noise
from hw.quant import QuantTensor, dequantize, quantize_activation
from hw.weights import expert, rows


class ReferenceOps:
    """See `hw.api.Ops` for shapes and meaning."""

    def rms_norm(self, x, weight, eps):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def quantizes(self, weight, dtype):
        return False

    def add_rms_norm(self, x, residual, weight, eps, dense=True, quant=False):
        total = x + residual
        normed = self.rms_norm(total, weight, eps)
        return Activation(normed if dense else None, quantize_activation(normed) if quant else None), total

    def rope(self, x, positions, table, out=None):
        half = x.shape[-1] // 2
        cos, sin = table[positions, None, :half], table[positions, None, half:]
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
        return rotated if out is None else out.copy_(rotated)

    def silu_mul(self, gate_up, quant=False, counts=None):
        gate, up = gate_up.chunk(2, dim=-1)
        out = self._silu(gate) * up
        return quantize_activation(out) if quant else out

    def _silu(self, x):
        return torch.nn.functional.silu(x)

    def _sigmoid(self, x):
        return x.sigmoid()

    def linear(self, x: Rows, weight: Matrix):
        if isinstance(x, QuantTensor):
            return self.linear(dequantize(x), dequantize(weight) if isinstance(weight, QuantTensor) else weight.float()).bfloat16()
        if isinstance(weight, QuantTensor):
            weight = dequantize(weight, x.dtype)
        return x @ weight.T

    def head_matmul(self, x, weight):
        """Product of each head: x `[T, H, K]`, weight `[H, K, N]`, result `[T, H, N]`."""
        return torch.einsum("thk,hkn->thn", x, weight)

    def absorb_query(self, q, positions, table, w_uk):
        nope = w_uk.shape[1]
        return torch.cat((self.head_matmul(q[..., :nope], w_uk), self.rope(q[..., nope:], positions, table)), dim=-1)

    def unabsorb(self, out, w_uv, quant=False):
        values = self.head_matmul(out, w_uv.transpose(1, 2)).flatten(1)
        return quantize_activation(values) if quant else values

    def expand_latent(self, latent, key, kv_up, nope):
        num_heads = kv_up.shape[0]
        k_nope = self.linear(latent, kv_up[:, :nope].flatten(0, 1)).unflatten(1, (num_heads, nope))
        values = self.linear(latent, kv_up[:, nope:].flatten(0, 1)).unflatten(1, (num_heads, kv_up.shape[1] - nope))
        return torch.cat((k_nope, key[:, None].expand(-1, num_heads, -1)), dim=-1), values

    def latent_write(self, down, q_norm, kv_norm, eps, positions, table, cache, slots, quant=False):
        q, kv = None, down
        if q_norm is not None:
            q, kv = self.rms_norm(down[:, : q_norm.shape[0]], q_norm, eps), down[:, q_norm.shape[0] :]
        rank = kv_norm.shape[0]
        latent = self.rms_norm(kv[:, :rank], kv_norm, eps)
        key = self.rope(kv[:, None, rank:], positions, table)[:, 0]
        self._write_entries(torch.cat((latent, key), dim=-1), cache, slots)
        return quantize_activation(q) if quant and q is not None else q, latent, key

    def _write_entries(self, entries, cache, slots):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = entries[token]

    def latent_gather(self, cache, page_table, first, lens):
        rows = [cache[page_table[i, (start + j) // cache.shape[1]], (start + j) % cache.shape[1]]
                for i, (start, length) in enumerate(zip(first, lens, strict=True)) for j in range(length)]  # fmt: skip
        return torch.stack(rows) if rows else cache.new_empty(0, cache.shape[-1])

    def decode_plan(self):
        return None

    def mla_decode(self, q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale, plan=None, with_lse=False):
        num_seqs, q_len, num_heads, _ = q.shape
        out = q.new_zeros(num_seqs, q_len, num_heads, kv_lora_rank)
        lse = torch.full((num_seqs, q_len, num_heads), -torch.inf)
        for i, seq_len in enumerate(seq_lens.tolist()):
            keys = self.latent_gather(cache, page_table[i : i + 1], [0], [seq_len]).float()
            for j in range(q_len if seq_len else 0):
                seen = keys[: seq_len - q_len + 1 + j]
                scores = q[i, j].float() @ seen.T * scale
                lse[i, j] = scores.logsumexp(-1)
                out[i, j] = (scores.softmax(-1) @ seen[:, :kv_lora_rank]).to(q.dtype)
        return out, lse if with_lse else None

    def mla_prefill(self, q, k, v, q_segments: Segments, k_segments: Segments, scale, causal):
        outs, lses = [q.new_empty(0, q.shape[1], v.shape[2])], [torch.empty(0, q.shape[1])]
        for q_i, k_i, v_i in zip(q.split(q_segments.lens), k.split(k_segments.lens), v.split(k_segments.lens), strict=True):
            scores = torch.einsum("thd,shd->hts", q_i.float(), k_i.float()) * scale
            if causal:
                hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + k_i.shape[0] - q_i.shape[0])
                scores = scores.masked_fill(hidden, -torch.inf)
            lse = scores.logsumexp(-1)
            outs.append(torch.einsum("hts,shd->thd", softmax_or_zero(scores, lse), v_i.float()).to(q.dtype))
            lses.append(lse.T)
        return torch.cat(outs), torch.cat(lses)

    def merge_attention(self, out_a, lse_a, out_b, lse_b):
        lse = torch.logaddexp(lse_a, lse_b)
        finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # both sets empty: weights 0, not NaN
        weight_a, weight_b = (lse_a - finite).exp()[..., None], (lse_b - finite).exp()[..., None]
        return (out_a.float() * weight_a + out_b.float() * weight_b).to(out_a.dtype), lse

    def prefers_absorbed(self, query_len, context_len, dims):
        return False

    def gate_logits(self, x, weight):
        return self.linear(x.float(), weight)

    def gate_topk(self, logits, bias, rule: GateRule, replicas: Replicas):
        scores = logits.softmax(-1) if rule.scoring == "softmax" else self._sigmoid(logits)
        choice = scores if bias is None else scores + bias
        if rule.num_groups > 1:
            groups = choice.view(choice.shape[0], rule.num_groups, choice.shape[1] // rule.num_groups)
            group_scores = groups.amax(-1) if rule.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
            kept = group_scores.sort(dim=-1, descending=True, stable=True).indices[:, : rule.topk_groups]
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
            choice = groups.masked_fill(dropped[..., None], -torch.inf).flatten(1)
        idx = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
        weight = scores.gather(1, idx)
        if rule.normalize:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return idx, replicas.physical(idx), weight * rule.scaling

    def grouped_linear(self, x: Rows, weight, layout: ExpertRows):
        pairs = zip(layout.starts, layout.starts[1:], strict=False)
        return torch.cat([self.linear(rows(x, first, last), expert(weight, e)) for e, (first, last) in enumerate(pairs)])

    def grouped_linear_masked(self, x: Rows, weight, counts, expected=None):
        return torch.stack([self.linear(expert(x, e), expert(weight, e)) for e in range(x.shape[0])])

    def fuses_experts(self, num_tokens, top_k, gate_up, dtype):
        return False

    def fused_gate_up(self, x, topk_phy, gate_up):
        out = x.new_empty(*topk_phy.shape, gate_up.shape[1] // 2)
        for token, chosen in enumerate(topk_phy.tolist()):
            for k, e in enumerate(chosen):
                out[token, k] = self.silu_mul(self.linear(x[token : token + 1], gate_up[e]))[0]
        return out

    def fused_down(self, inner, topk_phy, topk_weight, down, shared):
        total = torch.zeros(topk_phy.shape[0], down.shape[1])
        for token, chosen in enumerate(topk_phy.tolist()):
            for k, e in enumerate(chosen):
                total[token] += topk_weight[token, k] * self.linear(inner[token, k : k + 1], down[e])[0].float()
        return (total if shared is None else total + shared.float()).to(inner.dtype)

    def penalize(self, logits, inputs: PenaltyInputs):
        for i, row in enumerate(inputs.rows.tolist()):
            scores, counts = logits[row], inputs.output_counts[i]
            seen = inputs.prompt_mask[i] | (counts > 0)
            repeated = torch.where(scores > 0, scores / inputs.repetition[i], scores * inputs.repetition[i])
            scores = torch.where(seen, repeated, scores)
            logits[row] = scores - inputs.frequency[i] * counts - inputs.presence[i] * (counts > 0)

    def sample(self, logits, inputs: SampleInputs):
        tokens = logits.argmax(-1)
        for row in (inputs.temperature > 0).nonzero()[:, 0].tolist():
            one = slice(row, row + 1)
            scores = self._filter(logits[row] / inputs.temperature[row], inputs, row)
            noise = gumbel_noise(inputs.seed[one], inputs.sequence_idx[one], inputs.position[one], logits.shape[-1])
            tokens[row] = (scores.double() + noise[0]).argmax()
        return tokens

    def _filter(self, scores, inputs: SampleInputs, row: int):
        """Put tokens outside min-p, top-k and top-p to -inf; scores `[V]` after temperature. Ties at a border are all kept."""
        if inputs.min_p[row] > 0:
            probs = scores.softmax(-1)
            scores = scores.masked_fill(probs < inputs.min_p[row] * probs.max(), -torch.inf)
        if inputs.top_k[row] > 0:
            kth = scores.sort(descending=True).values[min(int(inputs.top_k[row]), scores.numel()) - 1]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if inputs.top_p[row] < 1:
            ordered = scores.sort(descending=True).values
            probs = ordered.softmax(-1)
            last = ((probs.cumsum(-1) - probs) < inputs.top_p[row]).sum().clamp(min=1) - 1  # the token that crosses top_p is kept
            scores = scores.masked_fill(scores < ordered[last], -torch.inf)
        return scores

    def logprobs(self, logits, tokens, num_top):
        logprobs = logits.log_softmax(-1)
        token = logprobs.gather(1, tokens[:, None])
        # Ranks and the best compare logits: the subtraction above can round different ones to the same value.
        rank = (logits > logits.gather(1, tokens[:, None])).sum(-1) + 1
        top_ids = best_tokens(logits, num_top)
        return Logprobs(token[:, 0], rank, top_ids, logprobs.gather(1, top_ids))


def softmax_or_zero(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dim by its log-sum-exp `lse`; a row of nothing but -inf gives zeros."""
    return (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp_()


def best_tokens(logits: torch.Tensor, num: int) -> torch.Tensor:
    """`[R, num]` int64, the best first. Of equal logits `topk` keeps any, and which ones depends on `num`, that is on the company."""
    best = torch.empty(logits.shape[0], num, dtype=torch.int64)
    if num:
        lowest = logits.topk(num, dim=-1).values[:, -1]
        for row, scores in enumerate(logits):
            tokens = (~(scores < lowest[row])).nonzero()[:, 0]
            best[row] = tokens[scores[tokens].sort(descending=True, stable=True).indices[:num]]
    return best


def num_outputs(weight: Matrix) -> int:
    """N of a weight `[..., N, K]`."""
    return (weight.data if isinstance(weight, QuantTensor) else weight).shape[-2]
