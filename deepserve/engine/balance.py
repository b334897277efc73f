"""Where an engine's experts are, and what keeps them balanced: the model's side of `eplb`."""

import math
from itertools import chain
from pathlib import Path

import torch

from deepserve.config import EngineConfig
from deepserve.model.decoder import Decoder
from eplb.balancer import Balancer
from eplb.cover import cover
from eplb.decide import Costs
from eplb.load import LoadProfile
from eplb.pack import Layout, rebalance
from eplb.placement import Placement
from hw.api import Backend, Unsupported
from hw.groups import Groups
from hw.moves import ExpertMoves
from hw.topology import ParallelConfig
from hw.weights import Weight


def layout_of(config: EngineConfig, parallel: ParallelConfig | None = None) -> Layout:
    """Of every MoE layer. Experts stay on the nodes of their groups where the gate limits how many groups a token may use.

    parallel: the ranks that there are, if they are not all that the instance was started with. A rank has more slots if it must.
    """
    moe, parallel = config.model.moe, parallel or config.parallel
    assert moe is not None
    slots = -(-(moe.num_experts + config.eplb.num_redundant_experts) // config.parallel.ep)
    slots = max(slots, -(-moe.num_experts // parallel.ep))
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
    return {
        layer: Placement(layout.num_logical, layout.num_ranks, tuple(row), layout.num_nodes)
        for layer, row in zip(profile.layers, rows, strict=True)
    }


def prepare_moves(model: Decoder, backend: Backend, groups: Groups) -> torch.Tensor:
    """Before memory is planned. Returns the buffer that moves need. Raises Unsupported where experts cannot move."""
    if backend.moves is None and groups.world.size > 1:
        raise Unsupported(f"{backend.name}: eplb_config step_interval, since its ranks cannot send each other experts")
    for layer in model.moe_layers().values():
        layer.prepare_moves()
    return buffer_for_moves(model, backend, groups)


def buffer_for_moves(model: Decoder, backend: Backend, groups: Groups) -> torch.Tensor:
    """As large as the experts of one layer."""
    num_bytes = max(sum(tensor.nbytes for tensor in layer.expert_tensors()) for layer in model.moe_layers().values())
    return backend.runtime.zeros((num_bytes if groups.world.size > 1 else 0,), torch.uint8)


def regroup_experts(config: EngineConfig, model: Decoder, backend: Backend, groups: Groups) -> list[Weight]:
    """After other ranks than before came together: each holds what it held, and what nobody held. Collective over them.

    Returns what this rank has yet to read from the checkpoint. Raises ValueError where a rank lacks the memory.
    """
    layers, world = list(model.moe_layers().values()), groups.world
    layout = layout_of(config, groups.parallel)
    num_held = len(layers[0].local.held)
    bytes_per_slot = sum(tensor.nbytes for layer in layers for tensor in layer.expert_tensors()) // num_held
    # Old and new experts of one layer are there at the same time.
    needed = max(0, layout.slots_per_rank - num_held) * bytes_per_slot + layout.slots_per_rank * bytes_per_slot // len(layers)
    free = backend.runtime.memory().free_bytes
    facts = world.all_gather_ints([num_held, needed, free])
    for rank, (_, needed, free) in enumerate(facts):
        if needed > free:
            raise ValueError(
                f"rank {rank} of {world.size} must hold {layout.slots_per_rank} experts a layer: {needed} bytes, {free} are free"
            )
    width = max(num for num, _, _ in facts)
    rows = world.all_gather_ints([e for layer in layers for e in (*layer.local.held, *[-1] * (width - num_held))])
    unread: list[Weight] = []
    for number, layer in enumerate(layers):
        held = [row[number * width :][:num] for row, (num, _, _) in zip(rows, facts, strict=True)]
        phy2log = chain.from_iterable(cover(held, layout.num_logical, layout.slots_per_rank))
        unread += layer.hold(Placement(layout.num_logical, world.size, tuple(phy2log), layout.num_nodes), world.rank)
    return unread


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
