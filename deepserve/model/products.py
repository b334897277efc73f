"""The weights whose products make up a step, one of each shape: what a backend compiles ahead, and what `inspect` asks it about."""

from deepserve.model.decoder import Decoder
from hw.api import Matrix


def products(model: Decoder) -> dict[str, Matrix]:
    """By role. `[N, K]` meets `linear`, `[E, N, K]` of experts the grouped ones; the gate's fp32 `[E, K]` is left out.

    All layers with experts are alike, and all without are. The model may lie on the meta device.
    """
    found: dict[str, Matrix] = {}
    for layer in model.layers:
        attention = layer.attention
        found |= {"attention down": attention.down, "query up": attention.q_up, "attention out": attention.out}
        mlps = {"dense": layer.dense}
        if layer.moe is not None:
            found |= {"experts gate and up": layer.moe.local.gate_up, "experts down": layer.moe.local.down}
            mlps = {"shared experts": layer.moe.shared}
        for name, mlp in mlps.items():
            if mlp is not None:
                found |= {f"{name} gate and up": mlp.gate_up, f"{name} down": mlp.down}
    return found | {"head": model.head}
