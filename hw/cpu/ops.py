"""CPU ops that the engine runs: the reference, with whole batches instead of loops where that is faster."""

import torch

from hw.api import ExpertRows, LatentDims, PenaltyInputs, Rows, SampleInputs, Segments
from hw.cpu.reference.ops import ReferenceOps, num_outputs, softmax_or_zero
from hw.cpu.reference.philox import gumbel_noise
from hw.quant import QuantTensor
from hw.weights import expert, rows

# Most fp32 scores that one attention product may hold, in elements; bounds memory whatever the lengths.
_SCORE_TILE = 1 << 24
# In bf16 a product takes 16 us however small it is. Up to these rows of an expert, and bytes of all experts' weights, one product over all
# experts, the idle ones too, takes less than one for each that is not.
_FEW_ROWS, _SMALL_EXPERTS = 64, 4 << 20


class CpuOps(ReferenceOps):
    """See `hw.api.Ops`. What is not here is as fast in the reference."""

    rows_by_library = True  # products are left to the library, whichever way it takes for a number of rows

    def head_matmul(self, x, weight):
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def _write_entries(self, entries, cache, slots):
        if slots.numel() and int(slots.min()) < 0:
            keep = slots >= 0
            slots, entries = slots[keep], entries[keep]
        cache.view(-1, cache.shape[-1])[slots] = entries

    def latent_gather(self, cache, page_table, first, lens):
        page_size = cache.shape[1]
        pieces = []
        for row, start, length in zip(page_table, first, lens, strict=True):
            low, high = start // page_size, -(-(start + length) // page_size)
            rows = cache[row[low:high].long()].flatten(0, 1)
            pieces.append(rows[start - low * page_size :][:length])
        return torch.cat(pieces) if pieces else cache.new_empty(0, cache.shape[-1])

    def mla_decode(self, q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale, plan=None, with_lse=False):
        num_seqs, q_len, num_heads, dim = q.shape
        num_pages = -(-max_seq_len // cache.shape[1])
        out = q.new_empty(num_seqs, q_len, num_heads, kv_lora_rank)
        lse = torch.empty(num_seqs, q_len, num_heads)
        step = max(1, _SCORE_TILE // max(1, num_pages * cache.shape[1] * max(q_len * num_heads, dim)))
        for low in range(0, num_seqs, step):
            part = slice(low, low + step)
            pages = page_table[part, :num_pages].clamp(min=0).long()
            keys = cache[pages].flatten(1, 2).float()  # [b, s, dim]
            scores = torch.bmm(q[part].flatten(1, 2).float(), keys.transpose(1, 2)).mul_(scale)
            scores = scores.view(keys.shape[0], q_len, num_heads, keys.shape[1])
            visible = seq_lens[part, None] - q_len + 1 + torch.arange(q_len)  # [b, q_len]
            hidden = torch.arange(keys.shape[1]) >= visible[..., None]
            scores.masked_fill_(hidden[:, :, None, :], -torch.inf)
            lse[part] = scores.logsumexp(-1)
            probs = softmax_or_zero(scores, lse[part])
            out[part] = torch.bmm(probs.flatten(1, 2), keys[..., :kv_lora_rank]).view(-1, q_len, num_heads, kv_lora_rank)
        return out, lse if with_lse else None

    def mla_prefill(self, q, k, v, q_segments: Segments, k_segments: Segments, scale, causal):
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        lse = torch.empty(q.shape[0], q.shape[1])
        q_first = 0
        for q_len, k_i, v_i in zip(q_segments.lens, k.split(k_segments.lens), v.split(k_segments.lens), strict=True):
            k_len = k_i.shape[0]
            keys, values = k_i.float().permute(1, 2, 0), v_i.float().transpose(0, 1)  # [H, d, s], [H, s, v]
            tile = max(1, _SCORE_TILE // max(1, k_len * q.shape[1]))
            for low in range(0, q_len, tile):
                high = min(low + tile, q_len)
                rows = slice(q_first + low, q_first + high)
                # Keys behind the last query of the tile are hidden from all of it.
                num_keys = max(0, k_len - (q_len - high)) if causal else k_len
                scores = torch.bmm(q[rows].float().transpose(0, 1), keys[:, :, :num_keys]).mul_(scale)
                if causal:
                    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(1 + k_len - q_len + low)
                    scores.masked_fill_(hidden, -torch.inf)
                tile_lse = scores.logsumexp(-1)
                lse[rows] = tile_lse.T
                out[rows] = torch.bmm(softmax_or_zero(scores, tile_lse), values[:, :num_keys]).transpose(0, 1)
            q_first += q_len
        return out, lse

    def prefers_absorbed(self, query_len, context_len, dims: LatentDims):
        # Per head and context token: absorbed pays 2L + r multiplications a query, naive pays the expansion once and n + r + v a query.
        absorbed = query_len * (2 * dims.latent + dims.rope)
        naive = dims.latent * (dims.nope + dims.value) + query_len * (dims.nope + dims.rope + dims.value)
        return context_len > 0 and absorbed < naive

    def grouped_linear(self, x: Rows, weight, layout: ExpertRows):
        out = torch.empty(x.shape[0], num_outputs(weight), dtype=_dense_dtype(x))
        for e, (low, count) in enumerate(zip(layout.starts, layout.counts, strict=False)):
            if count:
                out[low : low + count] = self.linear(rows(x, low, low + count), expert(weight, e))
        return out

    def grouped_linear_masked(self, x: Rows, weight, counts, expected=None):
        dense = self.rows_by_library and isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
        if dense and x.dtype == torch.bfloat16 and x.shape[1] <= _FEW_ROWS and weight.nbytes <= _SMALL_EXPERTS:
            return torch.bmm(x, weight.mT)
        out = torch.zeros(*x.shape[:2], num_outputs(weight), dtype=_dense_dtype(x))
        for e, count in enumerate(map(int, counts)):  # not `tolist`, which would go into no recording
            if count and dense:  # a decode step has dozens of these, of a row or two: what surrounds a product costs as much as it does
                torch.mm(x[e, :count], weight[e].T, out=out[e, :count])
            elif count:
                out[e, :count] = self.linear(rows(expert(x, e), 0, count), expert(weight, e))
        return out

    def penalize(self, logits, inputs: PenaltyInputs):
        scores, counts = logits[inputs.rows], inputs.output_counts
        generated = counts > 0
        repetition = inputs.repetition[:, None]
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(inputs.prompt_mask | generated, repeated, scores)
        logits[inputs.rows] = scores - inputs.frequency[:, None] * counts - inputs.presence[:, None] * generated

    def sample(self, logits, inputs: SampleInputs):
        tokens = logits.argmax(-1)
        if not inputs.any_sampled:
            return tokens
        rows = (inputs.temperature > 0).nonzero()[:, 0]
        scores = logits[rows] / inputs.temperature[rows, None]
        if inputs.any_filtered:
            self._filter_rows(scores, inputs, rows)
        noise = gumbel_noise(inputs.seed[rows], inputs.sequence_idx[rows], inputs.position[rows], logits.shape[-1])
        tokens[rows] = (scores.double() + noise).argmax(-1)
        return tokens

    def _filter_rows(self, scores, inputs: SampleInputs, rows):
        """min-p, top-k, top-p in place; scores `[S, V]` are rows `rows` of the batch after temperature."""
        min_p, top_k, top_p = inputs.min_p[rows], inputs.top_k[rows], inputs.top_p[rows]
        picked = (min_p > 0).nonzero()[:, 0]
        if picked.numel():
            some = scores[picked]
            probs = some.softmax(-1)
            scores[picked] = some.masked_fill(probs < min_p[picked, None] * probs.amax(-1, keepdim=True), -torch.inf)
        picked = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]
        if not picked.numel():
            return
        some, vocab_size = scores[picked], scores.shape[-1]
        ordered = some.sort(dim=-1, descending=True).values
        k = torch.where(top_k[picked] > 0, top_k[picked], vocab_size).clamp(max=vocab_size)
        kth = ordered.gather(1, k[:, None] - 1)
        ordered.masked_fill_(ordered < kth, -torch.inf)  # ties with the k-th stay, as in the reference
        probs = ordered.softmax(-1)
        last = ((probs.cumsum(-1) - probs) < top_p[picked, None]).sum(-1).clamp(min=1) - 1
        # top_p of 1 cuts nothing, whatever the rounding of the cumulative sum says.
        last = torch.where(top_p[picked] < 1, last, vocab_size - 1)
        border = torch.maximum(ordered.gather(1, last[:, None]), kth)
        scores[picked] = some.masked_fill(some < border, -torch.inf)


def _dense_dtype(x: Rows) -> torch.dtype:
    """Of a product of x."""
    return torch.bfloat16 if isinstance(x, QuantTensor) else x.dtype
