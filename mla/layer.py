"""One multi-head latent attention layer: projections, cache write, choice of form."""

import torch

from hw.api import LatentDims, Ops, Rows
from hw.weights import Storage, Weight, rows
from mla.absorbed import absorbed_chunk, absorbed_decode
from mla.config import MLAConfig
from mla.metadata import AttnMetadata, PrefillMeta
from mla.naive import naive_prefill

# Prefix tokens expanded at a time: 8,192 tokens of V3 are 8,192 x 128 x 320 x 2 bytes = 0.6 GiB.
WORKSPACE_TOKENS = 8192


class MLALayer:
    """Attention over a paged latent cache, for heads `first_head .. first_head + num_heads` of the model's.

    The latent down-projection and the cache are whole on every TP rank; up-projections and output projection hold this rank's heads, so the
    outputs of all TP ranks add up to the layer's.
    """

    def __init__(
        self,
        config: MLAConfig,
        ops: Ops,
        *,
        prefix: str,
        storage: Storage,
        table: torch.Tensor,
        first_head: int = 0,
        num_heads: int | None = None,
    ):
        num_heads = config.num_heads if num_heads is None else num_heads
        self.config, self.ops, self.prefix, self.table = config, ops, prefix, table
        self.first_head, self.num_heads = first_head, num_heads
        self.dims = LatentDims(config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)

        q_rank, q_out = config.q_lora_rank, num_heads * config.qk_head_dim
        # This rank's heads may end within an FP8 block; the whole model's end where the tensor does.
        split = num_heads < config.num_heads
        # Whatever reads the layer's input is one product: the down-projections of query and latent or, where queries have no latent, the
        # queries themselves and the latent.
        self.q_width = q_out if q_rank is None else q_rank
        self.down = storage.matrix(self.q_width + config.latent_dim, config.hidden_size, edges=(self.q_width,))
        self.q_up = None if q_rank is None else storage.matrix(q_out, q_rank, edges=(q_out,) if split else ())
        self.q_norm = None if q_rank is None else storage.dense(q_rank)
        self.kv_norm = storage.dense(config.kv_lora_rank)
        # Absorption takes this matrix apart by head, so it is never kept in blocks.
        self.kv_up = storage.dense(num_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        self.w_uk = self.kv_up[:, : config.qk_nope_head_dim]  # [H, n, L]
        self.w_uv = self.kv_up[:, config.qk_nope_head_dim :]  # [H, v, L]
        v_out = num_heads * config.v_head_dim
        self.out = storage.matrix(config.hidden_size, v_out, edges=(v_out,) if split else ())
        self.takes_quant, self.out_quant = ops.quantizes(self.down, storage.dtype), ops.quantizes(self.out, storage.dtype)
        self.q_quant = self.q_up is not None and ops.quantizes(self.q_up, storage.dtype)

    def weights(self) -> list[Weight]:
        """Checkpoint tensors of this layer, by their hub names."""
        c, q_rank, q_width = self.config, self.config.q_lora_rank, self.q_width

        def weight(name, shape, target, kind="matrix", rows_per_head=None, columns_per_head=None) -> Weight:
            first, last = self.first_head, self.first_head + self.num_heads
            index: tuple[slice, ...] = ()
            if rows_per_head is not None:
                index = (slice(first * rows_per_head, last * rows_per_head),)
            if columns_per_head is not None:
                index = (slice(None), slice(first * columns_per_head, last * columns_per_head))
            return Weight(name=f"{self.prefix}.{name}.weight", shape=shape, target=target, index=index, kind=kind)

        q_out, kv_out = c.num_heads * c.qk_head_dim, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        found = [
            weight("kv_a_proj_with_mqa", (c.latent_dim, c.hidden_size), rows(self.down, q_width, self.down.shape[0])),
            weight("kv_a_layernorm", (c.kv_lora_rank,), self.kv_norm, "norm"),
            weight("kv_b_proj", (kv_out, c.kv_lora_rank), self.kv_up, rows_per_head=kv_out // c.num_heads),
            weight("o_proj", (c.hidden_size, c.num_heads * c.v_head_dim), self.out, columns_per_head=c.v_head_dim),
        ]
        if q_rank is None:
            return [*found, weight("q_proj", (q_out, c.hidden_size), rows(self.down, 0, q_width), rows_per_head=c.qk_head_dim)]
        return [
            *found,
            weight("q_a_proj", (q_rank, c.hidden_size), rows(self.down, 0, q_width)),
            weight("q_a_layernorm", (q_rank,), self.q_norm, "norm"),
            weight("q_b_proj", (q_out, q_rank), self.q_up, rows_per_head=c.qk_head_dim),
        ]

    def forward(self, x: Rows, meta: AttnMetadata, cache: torch.Tensor) -> torch.Tensor:
        """x `[num_tokens, hidden]` normed, quantised if `takes_quant`, cache `[num_pages, page_size, L + r]` -> `[num_tokens, hidden]`.

        The result is this rank's part of the sum over TP ranks.
        """
        c, ops = self.config, self.ops
        down, q_input, latent, key = self.write(x, meta, cache)
        q = down[:, : self.q_width] if q_input is None else ops.linear(q_input, self.q_up)
        q = q.view(-1, self.num_heads, c.qk_head_dim)

        num_decode = 0 if meta.decode is None else meta.decode.num_tokens
        chunks, alone = slice(num_decode, None), meta.prefill is None
        parts: list[Rows] = []
        if meta.decode is not None:
            absorbed = ops.absorb_query(q[:num_decode], meta.positions[:num_decode], self.table, self.w_uk)
            attended = absorbed_decode(ops, absorbed, cache, meta.decode, c.kv_lora_rank, c.softmax_scale)
            parts.append(ops.unabsorb(attended, self.w_uv, quant=self.out_quant and alone))
        if meta.prefill is not None:
            parts.append(self._prefill(q[chunks], meta.positions[chunks], latent[chunks], key[chunks], meta.prefill, cache))
        parts = parts or [q.new_empty(0, self.num_heads * c.v_head_dim)]  # an idle rank's step
        return ops.linear(parts[0] if len(parts) == 1 else torch.cat(parts), self.out)

    def write(self, x: Rows, meta: AttnMetadata, cache: torch.Tensor) -> tuple:
        """The part of `forward` after which the cache has what later tokens attend to: the down projection and what `latent_write` says."""
        down = self.ops.linear(x, self.down)
        return down, *self.ops.latent_write(
            down if self.q_norm is not None else down[:, self.q_width :], self.q_norm, self.kv_norm, self.config.latent_norm_eps,
            meta.positions, self.table, cache, meta.slots, self.q_quant,
        )  # fmt: skip

    def _prefill(self, q, positions, latent, key, meta: PrefillMeta, cache: torch.Tensor) -> torch.Tensor:
        """All chunks of a step take one form, the one that the longest of them prefers. q as projected; result `[T, H * v]`."""
        c, ops = self.config, self.ops
        longest = max(range(len(meta.context_lens)), key=lambda i: meta.queries.lens[i])
        if not ops.prefers_absorbed(meta.queries.lens[longest], meta.context_lens[longest], self.dims):
            unrotated = q[..., c.qk_nope_head_dim :]
            ops.rope(unrotated, positions, self.table, out=unrotated)
            return naive_prefill(ops, q, latent, key, self.kv_up, cache, meta, c.softmax_scale, WORKSPACE_TOKENS).flatten(1)
        absorbed = ops.absorb_query(q, positions, self.table, self.w_uk).split(meta.queries.lens)
        attended = [absorbed_chunk(ops, part, cache, meta, i, c.kv_lora_rank, c.softmax_scale) for i, part in enumerate(absorbed)]
        return ops.unabsorb(torch.cat(attended), self.w_uv)
