"""CPU ops whose rows do not depend on the rest of the batch: matrix products over fixed tiles of 16 rows, attention page by page.

A row of a matrix product computed alone differs in its last bits from the same row in a larger product, because the library picks
another kernel. With every product of one shape the kernel is the same and so are the bits. silu and sigmoid need care too: their vector
code leaves ragged ends, also those where threads share the work, to scalar code with other last bits. The other elementwise ops
and reductions along a row are the same for any number of rows already. Prefill runs in absorbed form, token by token, exactly as
decode does, so that chunk borders and recomputation change nothing either.
"""

import torch

from hw.cpu.ops import CpuOps
from hw.quant import QuantTensor, dequantize

TILE = 16
_ROWS = 64  # attention rows at a time; only bounds memory, each row is its own batch entry
_ALIGN = 64  # bytes; the library's kernels may start differently at other addresses
_FLAT = 1 << 14  # elements: whole vectors, and below the size from which the library splits a call over threads
_VECTOR = 64  # elements: a multiple of what the library's vector code takes at a time


def _elementwise(function, x: torch.Tensor) -> torch.Tensor:
    flat = x.new_zeros(-(-x.numel() // _VECTOR) * _VECTOR)
    flat[: x.numel()] = x.flatten()
    return torch.cat([function(piece) for piece in flat.split(_FLAT)])[: x.numel()].view(x.shape)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % _ALIGN == 0 else x.clone()


class InvariantOps(CpuOps):
    """See `hw.api.Ops`."""

    rows_by_library = False

    def linear(self, x, weight):
        if isinstance(x, QuantTensor):
            return super().linear(x, weight)  # comes back dequantised
        if isinstance(weight, QuantTensor):
            weight = dequantize(weight, x.dtype)
        num_rows = x.shape[0]
        padded = x.new_zeros(-(-num_rows // TILE) * TILE, x.shape[1])
        padded[:num_rows] = x
        out = x.new_empty(padded.shape[0], weight.shape[0])
        weight = _aligned(weight).T
        for low in range(0, padded.shape[0], TILE):
            out[low : low + TILE] = _aligned(padded[low : low + TILE]) @ weight
        return out[:num_rows]

    def _silu(self, x):
        return _elementwise(super()._silu, x)

    def _sigmoid(self, x):
        return _elementwise(super()._sigmoid, x)

    def head_matmul(self, x, weight):
        return torch.stack([self.linear(x[:, h], weight[h].T) for h in range(x.shape[1])], dim=1)

    def mla_decode(self, q, cache, page_table, seq_lens, max_seq_len, kv_lora_rank, scale, plan=None, with_lse=False):
        num_seqs, q_len, num_heads, dim = q.shape
        lens = (seq_lens[:, None].long() - q_len + 1 + torch.arange(q_len)).clamp(min=0).flatten()  # keys seen by each row
        table = page_table.repeat_interleave(q_len, dim=0)
        rows = q.reshape(-1, num_heads, dim)
        out = q.new_empty(rows.shape[0], num_heads, kv_lora_rank)
        lse = torch.empty(rows.shape[0], num_heads)
        for low in range(0, rows.shape[0], _ROWS):
            part = slice(low, low + _ROWS)
            out[part], lse[part] = self._attend(rows[part], cache, table[part], lens[part], kv_lora_rank, scale)
        out, lse = out.view(num_seqs, q_len, num_heads, kv_lora_rank), lse.view(num_seqs, q_len, num_heads)
        return out, lse if with_lse else None

    def _attend(self, q, cache, table, lens, kv_lora_rank, scale):
        """One token's heads against its pages, in page order with a running maximum. q `[b, H, dim]`.

        Pages beyond a row's end add exact zeros, so the longest row of a batch changes nothing for the others.
        """
        num_rows, num_heads, dim = q.shape
        page_size = cache.shape[1]
        heads = -(-num_heads // TILE) * TILE
        wide = torch.zeros(num_rows, heads, dim)
        wide[:, :num_heads] = q
        top = torch.full((num_rows, heads, 1), -torch.inf)
        total = torch.zeros(num_rows, heads, 1)
        acc = torch.zeros(num_rows, heads, kv_lora_rank)
        offsets = torch.arange(page_size)
        for page in range(-(-int(lens.max()) // page_size)):
            keys = cache[table[:, page].clamp(min=0).long()].float()  # [b, page_size, dim]
            scores = torch.bmm(wide, keys.transpose(1, 2).contiguous()) * scale
            hidden = (page * page_size + offsets) >= lens[:, None]
            scores.masked_fill_(hidden[:, None, :], -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            # A row whose keys are all behind it keeps its old state: exp(-inf) = 0 and exp(0) = 1.
            safe_top = new_top.clamp(min=torch.finfo(torch.float32).min)
            decay = (top - safe_top).exp()
            probs = (scores - safe_top).exp()
            total = total * decay + probs.sum(-1, keepdim=True)
            acc = acc * decay + torch.bmm(probs, keys[..., :kv_lora_rank].contiguous())
            top = new_top
        out = acc / total.clamp(min=torch.finfo(torch.float32).tiny)
        return out[:, :num_heads].to(q.dtype), (top + total.log())[:, :num_heads, 0]

    def prefers_absorbed(self, query_len, context_len, dims):
        return True
