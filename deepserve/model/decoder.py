"""The decoder: where mla and moe meet. One class serves DeepSeek-V2, V3 and their kin; the config says which parts exist."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from deepserve.model.config import ModelConfig
from eplb.placement import Placement, initial_placement
from hw.api import Backend, ExpertStep
from hw.cache_spec import CacheSpec
from hw.topology import ParallelConfig
from hw.weights import Storage, Weight
from mla.cache import latent_cache
from mla.layer import MLALayer
from mla.metadata import AttnMetadata
from mla.rope import rope_table
from moe.layer import MoELayer
from moe.mlp import MLP
from moe.turns import Turns, take_turns
from mtp.head import DraftHead


@dataclass(frozen=True)
class Build:
    """What every layer of one rank is built from."""

    config: ModelConfig
    backend: Backend
    storage: Storage
    parallel: ParallelConfig
    rank: int
    num_redundant_experts: int
    placements: Mapping[int, Placement]  # by layer; the others hold experts in order
    rope: torch.Tensor  # [max_model_len, rope_dim] fp32


class DecoderLayer:
    """Norm, attention, norm, MLP, with the residual carried beside the hidden state so that each add joins the next norm."""

    def __init__(self, build: Build, layer_idx: int):
        config, ops, storage = build.config, build.backend.ops, build.storage
        prefix = f"model.layers.{layer_idx}"
        self.ops, self.eps, self.prefix = ops, config.rms_norm_eps, prefix
        self.input_norm = storage.dense(config.hidden_size)
        self.post_norm = storage.dense(config.hidden_size)
        self.tp = build.backend.tp
        heads = config.mla.num_heads // build.parallel.tp
        first_head = build.parallel.place(build.rank).tp * heads
        self.attention = MLALayer(
            config.mla, ops, prefix=f"{prefix}.self_attn", storage=storage, table=build.rope, first_head=first_head, num_heads=heads,
        )  # fmt: skip
        self.moe: MoELayer | None = None
        self.dense: MLP | None = None
        if config.is_moe_layer(layer_idx):
            assert config.moe is not None
            placement = build.placements.get(layer_idx) or initial_placement(
                config.moe.num_experts, build.parallel.ep, build.num_redundant_experts, build.parallel.nodes
            )
            ep_rank = build.parallel.place(build.rank).ep
            self.moe = MoELayer(config.moe, build.backend, placement, ep_rank, prefix=f"{prefix}.mlp", storage=storage)
        else:
            self.dense = MLP(config.hidden_size, config.intermediate_size, ops, prefix=f"{prefix}.mlp", storage=storage)
        # Rows of several TP ranks are gathered as they are; products quantise them after that.
        self.attention_quant = self.attention.takes_quant and self.tp.size == 1

    def weights(self) -> list[Weight]:
        hidden = (self.input_norm.shape[0],)
        mlp = self.moe if self.moe is not None else self.dense
        assert mlp is not None
        return [
            Weight(name=f"{self.prefix}.input_layernorm.weight", shape=hidden, target=self.input_norm, kind="norm"),
            Weight(name=f"{self.prefix}.post_attention_layernorm.weight", shape=hidden, target=self.post_norm, kind="norm"),
            *self.attention.weights(),
            *mlp.weights(),
        ]

    def forward(self, *args) -> tuple[torch.Tensor, torch.Tensor]:
        """`turns`, all at once."""
        (result,) = take_turns([self.turns(*args)])
        return result

    def write(self, x: torch.Tensor, meta: AttnMetadata, cache: torch.Tensor, lens: list[int]) -> None:
        """What a layer that gets x as its input, and no residual, leaves in its cache; nothing else is computed."""
        self.attention.write(self.tp.all_gather_rows(self.ops.rms_norm(x, self.input_norm, self.eps), lens), meta, cache)

    def turns(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttnMetadata,
        cache: torch.Tensor,
        step: ExpertStep,
        lens: list[int],
    ) -> Turns[tuple[torch.Tensor, torch.Tensor]]:
        """x, residual `[lens[tp rank], hidden]` -> the same pair; the layer's output is their sum.

        Between attentions each TP rank has its slice of the tokens; attention sees all of them, with this rank's heads.
        """
        if residual is None:
            normed, residual = self.ops.rms_norm(x, self.input_norm, self.eps), x
        else:
            quant = self.attention_quant
            forms, residual = self.ops.add_rms_norm(x, residual, self.input_norm, self.eps, not quant, quant)
            normed = forms.rows(quant)
        x = self.attention.forward(self.tp.all_gather_rows(normed, lens), meta, cache)
        x = self.tp.reduce_scatter_rows(x, lens)
        if self.moe is not None:
            forms, residual = self.ops.add_rms_norm(x, residual, self.post_norm, self.eps, True, self.moe.takes_quant)
            return (yield from self.moe.turns(forms, step)), residual
        quant = self.dense.takes_quant
        forms, residual = self.ops.add_rms_norm(x, residual, self.post_norm, self.eps, not quant, quant)
        return self.dense.forward(forms.rows(quant)), residual


class Decoder:
    """Embedding, layers, final norm, head. Holds weights; caches belong to the runner."""

    def __init__(
        self, config: ModelConfig, backend: Backend, dtype: torch.dtype, *, parallel: ParallelConfig, rank: int, max_model_len: int,
        num_redundant_experts: int, placements: Mapping[int, Placement] | None = None, with_mtp: bool = False, keep_fp8: bool = False,
        device: torch.device | None = None,
    ):  # fmt: skip
        """Allocates storage and fills none of it.

        placements: of some layers' experts, by the layers' numbers; those of others are in order. with_mtp: the first MTP module too.
        keep_fp8: matrices that the checkpoint holds in block-FP8 stay so. device: where, if not the backend's own; "meta" for sizes only.
        """
        device = device or backend.runtime.device
        rope = rope_table(config.mla, max_model_len, device)
        fp8 = config.quantization if keep_fp8 else None
        storage = Storage(dtype, device, empty=backend.runtime.empty if device == backend.runtime.device else None)
        if fp8 is not None:
            storage = replace(storage, fp8_block=(fp8.block_n, fp8.block_k), scale_format=fp8.scale_format)
        build = Build(config, backend, storage, parallel, rank, num_redundant_experts, placements or {}, rope)
        self.config, self.ops, self.dtype, self.parallel, self.tp = config, backend.ops, dtype, parallel, backend.tp
        self.embedding = storage.dense(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(build, i) for i in range(config.num_layers)]
        self.norm = storage.dense(config.hidden_size)
        self.draft_head: DraftHead | None = None
        self._make_guess_head, self._guess_head = backend.guess_head, None
        if with_mtp:
            idx, eps = config.mtp.first_layer_idx, config.rms_norm_eps
            block = DecoderLayer(build, idx)
            self.draft_head = DraftHead(
                block, backend.ops, prefix=f"model.layers.{idx}", storage=storage, hidden_size=config.hidden_size, eps=eps
            )
        # The head is split over the TP ranks by vocabulary.
        self._vocab_lens = even_slices(config.vocab_size, parallel.tp)
        first = sum(self._vocab_lens[: self.tp.rank])
        self._vocab = slice(first, first + self._vocab_lens[self.tp.rank])
        if config.tie_word_embeddings:
            self.head = self.embedding[self._vocab]
        else:
            self.head = storage.dense(self._vocab_lens[self.tp.rank], config.hidden_size)

    def weights(self) -> list[Weight]:
        """Everything this rank holds, by checkpoint name."""
        shape = tuple(self.embedding.shape)
        found = [
            Weight(name="model.embed_tokens.weight", shape=shape, target=self.embedding, kind="matrix"),
            Weight(name="model.norm.weight", shape=tuple(self.norm.shape), target=self.norm, kind="norm"),
        ]
        if not self.config.tie_word_embeddings:
            found.append(Weight(name="lm_head.weight", shape=shape, target=self.head, index=(self._vocab,)))
        parts = self.layers if self.draft_head is None else [*self.layers, self.draft_head]
        return found + [weight for part in parts for weight in part.weights()]

    def placements(self) -> list[Placement | None]:
        """Expert placement of each layer, None for dense ones."""
        return [None if layer.moe is None else layer.moe.placement for layer in self.layers]

    def moe_layers(self) -> dict[int, MoELayer]:
        """By their numbers in the model, the MTP module's last."""
        blocks = dict(enumerate(self.layers))
        if self.draft_head is not None:
            blocks[self.config.mtp.first_layer_idx] = self.draft_head.block
        return {idx: block.moe for idx, block in blocks.items() if block.moe is not None}

    def reserve(self) -> None:
        """Take the memory that steps keep besides weights and caches. Collective over the instance; the weights are there."""
        if self.draft_head is not None and self._make_guess_head is not None:
            self._guess_head = self._make_guess_head(self.head)
        for layer in self.layers:
            if layer.moe is not None:
                layer.moe.reserve()

    def cache_spec(self) -> CacheSpec:
        """One latent entry per layer, in the model dtype; the MTP module's comes last."""
        name = str(self.dtype).removeprefix("torch.")
        num_layers = len(self.layers) + (self.draft_head is not None)
        return CacheSpec((latent_cache(self.config.mla, name),) * num_layers)

    def forward(self, token_ids: torch.Tensor, meta: AttnMetadata, caches: list[torch.Tensor], step: ExpertStep) -> torch.Tensor:
        """token_ids `[num_tokens]` int64 -> hidden `[num_tokens, hidden]` after the final norm. Writes this step's latents to `caches`."""
        if not step.overlapped:
            (hidden,) = take_turns([self._turns(token_ids, meta, caches, step)])
            return hidden
        cut = meta.middle()
        parts = [(token_ids[:cut], meta.part(0, cut)), (token_ids[cut:], meta.part(cut, len(token_ids)))]
        return torch.cat(take_turns([self._turns(*part, caches, step) for part in parts]))

    def _turns(self, token_ids: torch.Tensor, meta: AttnMetadata, caches: list[torch.Tensor], step: ExpertStep) -> Turns[torch.Tensor]:
        """`forward` of one micro-batch."""
        meta = meta.planned(self.ops.decode_plan())
        lens = even_slices(token_ids.shape[0], self.tp.size)
        first = sum(lens[: self.tp.rank])
        x, residual = self._embed(token_ids[first : first + lens[self.tp.rank]]), None
        for layer, cache in zip(self.layers, caches[: len(self.layers)], strict=True):
            x, residual = yield from layer.turns(x, residual, meta, cache, step, lens)
        normed, _ = self.ops.add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)
        return self.tp.all_gather_rows(normed.rows(quantized=False), lens)

    def draft(
        self, next_ids: torch.Tensor, hidden: torch.Tensor, meta: AttnMetadata, caches: list[torch.Tensor], step: ExpertStep, written: bool
    ) -> torch.Tensor:
        """One pass of the MTP module at the positions of `meta`: `[num_tokens, hidden]` whose `logits` are for two positions on.

        next_ids `[num_tokens]` int64: the token behind each position; hidden `[num_tokens, hidden]`: what this pass one position before
        gave there, or, if `written`, `write_drafts`.
        """
        assert self.draft_head is not None
        lens = even_slices(next_ids.shape[0], self.tp.size)
        joined = hidden if written and self.tp.size == 1 else self._join(next_ids, hidden, lens)
        meta = meta.planned(self.ops.decode_plan())
        return self.tp.all_gather_rows(self.draft_head.forward(joined, meta, caches[-1], step, lens), lens)

    def write_drafts(self, next_ids: torch.Tensor, hidden: torch.Tensor, meta: AttnMetadata, caches: list[torch.Tensor]) -> torch.Tensor:
        """Only what `draft` leaves in the cache. No experts, so other ranks need not take part.

        hidden `[num_tokens, hidden]` is what `forward` gave. Returns as much, what `draft` begins with at any of these positions: where one
        rank has all rows, they need not be joined again.
        """
        assert self.draft_head is not None
        lens = even_slices(next_ids.shape[0], self.tp.size)
        joined = self._join(next_ids, hidden, lens)
        self.draft_head.write(joined, meta, caches[-1], lens)
        return joined if self.tp.size == 1 else hidden

    def _join(self, next_ids: torch.Tensor, hidden: torch.Tensor, lens: list[int]) -> torch.Tensor:
        """This TP rank's slice of the next tokens and hidden states, as the MTP module's block takes them."""
        first = sum(lens[: self.tp.rank])
        mine = slice(first, first + lens[self.tp.rank])
        return self.draft_head.join(self._embed(next_ids[mine]), hidden[mine])

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        # Not an index: on a CPU that calls threads for a hundred tokens, and they keep their cores for milliseconds after it.
        return self.embedding.index_select(0, token_ids)

    def idle(self, step: ExpertStep) -> None:
        """A step without tokens of ours: this rank's experts serve the others' tokens."""
        take_turns([self._serve(self.layers, step) for _ in range(1 + step.overlapped)])

    def idle_drafts(self, step: ExpertStep, num_passes: int) -> None:
        """The same for passes of the MTP module."""
        if num_passes:
            assert self.draft_head is not None
            take_turns([self._serve([self.draft_head.block] * num_passes, step)])

    def _serve(self, layers: list[DecoderLayer], step: ExpertStep) -> Turns[None]:
        nothing = self.embedding[:0]
        for layer in layers:
            if layer.moe is not None:
                forms, _ = self.ops.add_rms_norm(nothing, nothing, layer.post_norm, layer.eps, True, layer.moe.takes_quant)
                yield from layer.moe.turns(forms, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """hidden `[R, hidden]` after the final norm -> `[R, vocab]` fp32 at rank 0 of the TP group, None elsewhere."""
        return self.tp.gather_columns(self.ops.linear(hidden, self.head).float(), self._vocab_lens)

    def draft_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The same for what `draft` gave; nearly, where the backend has something cheaper than the head."""
        if self._guess_head is None:
            return self.logits(hidden)
        return self.tp.gather_columns(self._guess_head.logits(hidden), self._vocab_lens)


def even_slices(num: int, parts: int) -> list[int]:
    """Sizes of `parts` consecutive slices of `num` things, the first ones larger by one where it does not divide."""
    return [num // parts + (i < num % parts) for i in range(parts)]
