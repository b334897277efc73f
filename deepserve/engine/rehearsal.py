"""A few prefill steps of nobody's tokens before the first request, so that ready means ready.

What is compiled, loaded or allocated at first use has been used: prompts without and with cached context, both forms of attention, both
ways to the experts, and the draws. Nothing is written to the cache. (Decode steps have been captured by then.)
"""

from dataclasses import replace

import torch

from deepserve.engine.lockstep import expert_step
from deepserve.model.decoder import Decoder
from hw.api import Backend, SampleInputs, Segments
from mla.metadata import AttnMetadata, PrefillMeta

# (tokens, cached tokens before them): a long prompt, its second chunk, and a chunk short enough to attend in absorbed form.
CHUNKS = ((1024, 0), (512, 64), (16, 64), (16, 0))


@torch.inference_mode()
def rehearse(model: Decoder, backend: Backend, caches: list[torch.Tensor], *, max_tokens: int, max_model_len: int, cap: int) -> None:
    """Collective over the instance. max_tokens: of a step; cap: most tokens of a rank in the low-latency dispatch."""
    for num_tokens, context_len in CHUNKS:
        num_tokens = min(num_tokens, max_tokens, max_model_len - context_len)
        if num_tokens < 1:
            continue
        meta = _chunk(num_tokens, context_len, caches[0].shape[1], backend)
        step = expert_step([-(-num_tokens // model.tp.size)], cap)
        hidden = model.forward(torch.zeros_like(meta.positions), meta, caches, step)
    logits = model.logits(hidden[-1:])
    if logits is not None:
        for any_sampled, any_filtered in ((False, False), (True, False), (True, True)):
            backend.ops.sample(logits, replace(_draw(backend), any_sampled=any_sampled, any_filtered=any_filtered))
        backend.ops.logprobs(logits, torch.zeros_like(meta.positions[:1]), 1)
    backend.runtime.synchronize()


def _chunk(num_tokens: int, context_len: int, page_size: int, backend: Backend) -> AttnMetadata:
    """One sequence that reads page 0 and writes nowhere."""
    device, end = backend.runtime.device, context_len + num_tokens
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([end], dtype=torch.int32, device=device)
    pages = torch.zeros((1, -(-end // page_size)), dtype=torch.int32, device=device)
    positions = torch.arange(context_len, end, device=device)
    prefill = PrefillMeta(Segments([num_tokens], starts), [context_len], seq_lens, pages)
    return AttnMetadata(positions, torch.full_like(positions, -1), None, prefill)


def _draw(backend: Backend) -> SampleInputs:
    ones, zeros = (make(1, device=backend.runtime.device) for make in (torch.ones, torch.zeros))
    ids = zeros.long()
    return SampleInputs(ones, ids + 1, ones, zeros, ids, ids, ids, any_sampled=True, any_filtered=True)
