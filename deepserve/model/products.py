"""The weights whose products make up a step, one of each shape: what a backend compiles ahead, and what `inspect` asks it about."""

from deepserve.config import EngineConfig
from deepserve.model.decoder import Decoder
from hw.api import Matrix
from hw.rules import Decode, ModelShapes


def products(model: Decoder) -> dict[str, Matrix]:
    """By role. `[N, K]` meets `linear`, `[E, N, K]` of experts the grouped ones; the gate's fp32 `[E, K]` is left out.

    All layers with experts are alike, and all without are. The model may lie on the meta device.
    """
    found: dict[str, Matrix] = {}
    for layer in model.layers:
        attention = layer.attention
        found |= {"attention down": attention.down, "attention out": attention.out}
        if attention.q_up is not None:
            found["query up"] = attention.q_up
        mlps = {"dense": layer.dense}
        if layer.moe is not None:
            found |= {"experts gate and up": layer.moe.local.gate_up, "experts down": layer.moe.local.down}
            mlps = {"shared experts": layer.moe.shared}
        for name, mlp in mlps.items():
            if mlp is not None:
                found |= {f"{name} gate and up": mlp.gate_up, f"{name} down": mlp.down}
    return found | {"head": model.head}


def model_shapes(config: EngineConfig, model: Decoder) -> ModelShapes:
    """Of this rank's part of the model, and of its steps."""
    args, mla, moe = config.args, config.model.mla, config.model.moe
    heads = mla.num_heads // config.parallel.tp
    return ModelShapes(
        dtype=model.dtype,
        decode=Decode(model.dtype, 1, 1, heads, mla.kv_lora_rank, mla.qk_rope_head_dim, config.page_size, config.max_model_len),
        products=products(model),
        top_k=1 if moe is None else moe.top_k,
        max_rows=args.max_num_batched_tokens,
        max_low_latency_rows=min(args.max_num_batched_tokens, args.max_dispatch_tokens_per_rank),
        num_ranks=config.parallel.num_ranks,
    )
