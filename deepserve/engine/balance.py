"""Where an engine's experts are, and what keeps them balanced: the model's side of `eplb`."""

import math
from pathlib import Path

import torch

from deepserve.config import EngineConfig
from deepserve.model.decoder import Decoder
from eplb.balancer import Balancer
from eplb.decide import Costs
from eplb.load import LoadProfile
from eplb.pack import Layout, rebalance
from eplb.placement import Placement
from hw.api import Backend, Unsupported
from hw.groups import Groups
from hw.moves import ExpertMoves


def layout_of(config: EngineConfig) -> Layout:
    """Of every MoE layer. Experts stay on the nodes of their groups where the gate limits how many groups a token may use."""
    moe, parallel = config.model.moe, config.parallel
    assert moe is not None
    slots = -(-(moe.num_experts + config.eplb.num_redundant_experts) // parallel.ep)
    return Layout(moe.num_experts, parallel.ep, slots, parallel.nodes, moe.num_groups if moe.grouped else 1)


def initial_placements(config: EngineConfig) -> dict[int, Placement]:
    """Those that the user's load profile asks for; none without one. Raises ValueError."""
    if config.eplb.load_profile is None:
        return {}
    if config.model.moe is None:
        raise ValueError(f"load_profile {config.eplb.load_profile} is of no use: the model has no experts")
    layout, mtp = layout_of(config), config.model.mtp
    layers = (*config.model.moe_layers, *range(mtp.first_layer_idx, mtp.first_layer_idx + mtp.num_layers))
    profile = LoadProfile.read(Path(config.eplb.load_profile), layers, layout.num_logical)
    rows = rebalance(profile.load(), layout).tolist()
    return {layer: Placement(layout.num_logical, layout.num_ranks, tuple(row)) for layer, row in zip(profile.layers, rows, strict=True)}


def prepare_moves(model: Decoder, backend: Backend, groups: Groups) -> torch.Tensor:
    """Before memory is planned. Returns the buffer that moves need. Raises Unsupported where experts cannot move."""
    if backend.moves is None and groups.world.size > 1:
        raise Unsupported(f"{backend.name}: eplb_config step_interval, since its ranks cannot send each other experts")
    layers = model.moe_layers().values()
    for layer in layers:
        layer.prepare_moves()
    num_bytes = max(sum(tensor.nbytes for tensor in layer.expert_tensors()) for layer in layers)
    return backend.runtime.zeros((num_bytes if groups.world.size > 1 else 0,), torch.uint8)


def open_balancer(config: EngineConfig, model: Decoder, backend: Backend, groups: Groups, buffer: torch.Tensor) -> Balancer:
    """After steps were captured: what is counted from here on is load."""
    layers, moe = model.moe_layers(), config.model.moe
    assert moe is not None
    # One rank alone only counts.
    moves = backend.moves or ExpertMoves(groups.world, math.inf, math.inf, math.inf)
    tensors = next(iter(layers.values())).expert_tensors()
    costs = Costs(
        token_s=6 * moe.hidden_size * moe.intermediate_size / moves.expert_flops_per_s,
        expert_bytes=sum(tensor.nbytes for tensor in tensors) // tensors[0].shape[0],
        node_bytes_per_s=moves.node_bytes_per_s,
        network_bytes_per_s=moves.network_bytes_per_s,
    )
    return Balancer(
        layers, config.eplb, layout_of(config), costs, control=groups.world, data=moves.group, buffer=buffer, runtime=backend.runtime
    )
