"""Gate and layer against transformers' V2 and V3 classes; modes, replicas, stages and batch invariance against each other."""

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch

from eplb.placement import Placement, initial_placement
from hw.api import Activation, ExpertMode, ExpertStep
from hw.select import open_backend
from hw.testing import assert_close
from hw.weights import Storage
from moe.config import MoEConfig
from moe.gate import Gate
from moe.layer import MoELayer
from moe.router import replicas_of

CPU = torch.device("cpu")
BACKENDS = {"plain": open_backend("cpu"), "invariant": open_backend("cpu", batch_invariant=True)}
# As where two kernels do what routed experts do, from dispatch to combine.
BACKENDS["fused"] = dataclasses.replace(BACKENDS["plain"], ops=copy.copy(BACKENDS["plain"].ops))
BACKENDS["fused"].ops.fuses_experts = lambda *shape: True
MODES = pytest.mark.parametrize("mode", list(ExpertMode))
_V2 = MoEConfig(
    hidden_size=32, intermediate_size=20, num_experts=12, num_shared_experts=2, top_k=4, scoring="softmax", topk_method="greedy",
    num_groups=1, topk_groups=1, norm_topk_prob=False, routed_scaling_factor=1.0,
)  # fmt: skip
_V3 = dataclasses.replace(
    _V2, num_experts=16, num_shared_experts=1, scoring="sigmoid", topk_method="noaux_tc", num_groups=4, topk_groups=2, norm_topk_prob=True,
    routed_scaling_factor=2.5,
)  # fmt: skip
CONFIGS = {
    "v2-lite": _V2,
    "v2": dataclasses.replace(_V2, topk_method="group_limited_greedy", num_groups=4, topk_groups=2, routed_scaling_factor=16.0),
    "v3": _V3,
    "v3-not-normalized": dataclasses.replace(_V3, norm_topk_prob=False),
    "moonlight": dataclasses.replace(_V3, num_groups=1, topk_groups=1, routed_scaling_factor=2.446),
}


def step(mode: ExpertMode, max_tokens: int = 128) -> ExpertStep:
    """`max_tokens` is the largest batch of any rank."""
    return ExpertStep(mode, max_tokens)


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> MoEConfig:
    return CONFIGS[request.param]


def theirs(config: MoEConfig) -> Any:
    """transformers' module of the same sizes, every parameter random."""
    import transformers
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    sizes = {
        "hidden_size": config.hidden_size, "moe_intermediate_size": config.intermediate_size, "n_routed_experts": config.num_experts,
        "n_shared_experts": config.num_shared_experts, "num_experts_per_tok": config.top_k, "n_group": config.num_groups,
        "topk_group": config.topk_groups, "routed_scaling_factor": config.routed_scaling_factor, "norm_topk_prob": config.norm_topk_prob,
    }  # fmt: skip
    if config.has_bias:
        module = DeepseekV3MoE(transformers.DeepseekV3Config(**sizes))
        module.gate.e_score_correction_bias.copy_(torch.randn(config.num_experts) * 0.3)
    else:
        module = DeepseekV2Moe(transformers.DeepseekV2Config(**sizes, topk_method=config.topk_method))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
        module.gate.weight.mul_(3.0)
    return module


def hub_weights(module: Any) -> dict[str, torch.Tensor]:
    """The module's tensors under the names of a checkpoint, its fused experts taken apart."""
    found = {"mlp.gate.weight": module.gate.weight}
    if hasattr(module.gate, "e_score_correction_bias"):
        found["mlp.gate.e_score_correction_bias"] = module.gate.e_score_correction_bias
    for e, (gate_up, down) in enumerate(zip(module.experts.gate_up_proj, module.experts.down_proj, strict=True)):
        gate, up = gate_up.chunk(2)
        named = (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
        found |= {f"mlp.experts.{e}.{name}.weight": tensor for name, tensor in named}
    found |= {f"mlp.shared_experts.{name}": tensor for name, tensor in module.shared_experts.named_parameters()}
    return {name: tensor.detach() for name, tensor in found.items()}


def ours(
    config: MoEConfig, weights: dict[str, torch.Tensor], backend: str = "plain", placement: Placement | None = None, dtype=torch.float32
) -> MoELayer:
    placement = placement or initial_placement(config.num_experts, 1)
    layer = MoELayer(config, BACKENDS[backend], placement, 0, prefix="mlp", storage=Storage(dtype, BACKENDS[backend].runtime.device))
    for weight in layer.weights():
        assert tuple(weights[weight.name].shape) == weight.shape, weight.name
        weight.fill(weights[weight.name][weight.index])
    assert {weight.name for weight in layer.weights()} == set(weights)
    return layer


def test_gate_equals_the_routers_of_transformers(config: MoEConfig):
    module, x = theirs(config), torch.randn(200, config.hidden_size)
    gate = Gate(config, BACKENDS["plain"].ops, prefix="mlp.gate", device=CPU)
    for weight in gate.weights():
        weight.fill(hub_weights(module)[weight.name])
    idx, _, weight = gate.forward(x, replicas_of(initial_placement(config.num_experts, 1), CPU))
    with torch.no_grad():
        _, their_weight, their_idx = module.gate(x)
    # The order of the k experts is theirs to choose, so compare weights by expert.
    dense, their_dense = (
        torch.zeros(200, config.num_experts).scatter(1, i, w) for i, w in ((idx, weight), (their_idx, their_weight))
    )  # fmt: skip
    assert torch.equal(idx.sort(-1).values, their_idx.sort(-1).values)
    assert_close(dense, their_dense, (1e-5, 1e-6), "weights")
    assert weight.dtype == torch.float32 and idx.dtype == torch.int64


def test_a_bfloat16_gate_decides_in_fp32(config: MoEConfig):
    module, x = theirs(config), torch.randn(50, config.hidden_size).bfloat16()
    layer = ours(config, hub_weights(module), dtype=torch.bfloat16)
    assert layer.gate.weight.dtype == torch.float32
    routed, exact = layer.route(x), layer.gate.forward(x.float(), layer.replicas)
    assert torch.equal(routed.topk_idx, exact[0]) and torch.equal(routed.topk_weight, exact[2])


@MODES
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_redundant", [0, 5])
def test_layer_equals_the_classes_of_transformers(config: MoEConfig, backend: str, mode: ExpertMode, num_redundant: int):
    module, x = theirs(config), torch.randn(60, config.hidden_size)
    layer = ours(config, hub_weights(module), backend, initial_placement(config.num_experts, 1, num_redundant))
    with torch.no_grad():
        assert_close(layer.forward(Activation(x), step(mode)), module(x[None])[0], (1e-4, 1e-5), "layer")


@MODES
@pytest.mark.parametrize("shared", [0, 1])
def test_layer_equals_a_loop_over_tokens_and_experts(mode: ExpertMode, shared: int):
    config = dataclasses.replace(_V3, num_shared_experts=shared)
    weights = {name: tensor for name, tensor in hub_weights(theirs(_V3)).items() if shared or "shared" not in name}
    layer, x = ours(config, weights), torch.randn(9, config.hidden_size)
    idx, _, weight = layer.gate.forward(x, layer.replicas)

    def mlp(name: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (weights[f"mlp.{name}.{part}_proj.weight"].double() for part in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    expected = torch.zeros(9, config.hidden_size, dtype=torch.float64)
    for t, k in itertools.product(range(9), range(config.top_k)):
        expected[t] += weight[t, k].double() * mlp(f"experts.{int(idx[t, k])}", x[t].double())
    if shared:
        expected += torch.stack([mlp("shared_experts", row.double()) for row in x])
    assert_close(layer.forward(Activation(x), step(mode)), expected, (1e-4, 1e-5), "layer")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_modes_and_replicas_give_the_same_bits_with_invariant_ops(config: MoEConfig, dtype: torch.dtype):
    weights, x = hub_weights(theirs(config)), torch.randn(60, config.hidden_size).to(dtype)
    slots = torch.cat((torch.randperm(config.num_experts), torch.randint(0, config.num_experts, (7,)))).tolist()
    placements = [initial_placement(config.num_experts, 1, extra) for extra in (0, 21)] + [Placement(config.num_experts, 1, tuple(slots))]
    layers = [ours(config, weights, "invariant", placement, dtype) for placement in placements]
    expected = layers[0].forward(Activation(x), step(ExpertMode.THROUGHPUT))
    assert expected.dtype == dtype
    for layer, mode in itertools.product(layers, ExpertMode):
        assert torch.equal(layer.forward(Activation(x), step(mode)), expected), (layer.placement.phy2log, mode)
    # A token alone or in other company.
    for mode, rows in itertools.product(ExpertMode, (torch.tensor([17]), torch.randperm(60)[:40])):
        assert torch.equal(layers[-1].forward(Activation(x[rows]), step(mode)), expected[rows]), (mode, len(rows))


def test_modes_agree_closely_otherwise(config: MoEConfig):
    layer, x = ours(config, hub_weights(theirs(config))), torch.randn(60, config.hidden_size)
    assert_close(
        layer.forward(Activation(x), step(ExpertMode.LOW_LATENCY)),
        layer.forward(Activation(x), step(ExpertMode.THROUGHPUT)),
        (1e-4, 1e-5),
        "modes",
    )


@MODES
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(config: MoEConfig, backend: str, mode: ExpertMode):
    layer = ours(config, hub_weights(theirs(config)), backend)
    out = layer.forward(Activation(torch.zeros(0, config.hidden_size)), step(mode))
    assert out.shape == (0, config.hidden_size)


def test_low_latency_has_a_cap():
    layer = ours(_V3, hub_weights(theirs(_V3)))
    assert layer.comm.max_tokens_per_rank == 128
    with pytest.raises(AssertionError, match="129"):
        layer.forward(Activation(torch.randn(129, _V3.hidden_size)), step(ExpertMode.LOW_LATENCY, 129))
    assert layer.forward(Activation(torch.randn(129, _V3.hidden_size)), step(ExpertMode.THROUGHPUT, 129)).shape == (129, _V3.hidden_size)


@MODES
def test_stages_of_two_micro_batches_interleave(mode: ExpertMode):
    """What overlap does: both batches are under way at once, and each result is that of `forward`."""
    layer = ours(_V3, hub_weights(theirs(_V3)))
    batches = [torch.randn(11, _V3.hidden_size), torch.randn(30, _V3.hidden_size)]
    expected = [layer.forward(Activation(x), step(mode)) for x in batches]
    routed = [layer.route(x) for x in batches]
    sent = [layer.dispatch(Activation(x), r, step(mode)) for x, r in zip(batches, routed, strict=True)]
    shared = [layer.shared.forward(x) for x in batches]
    outputs = [layer.experts(d) for d in sent]
    for i in (1, 0):
        assert torch.equal(layer.combine(outputs[i], routed[i], sent[i], shared[i]), expected[i])


def test_a_rank_holds_the_weights_of_its_slots():
    placement = initial_placement(16, 3)  # six slots each, the last two are replicas of 0 and 1
    for rank, held in enumerate([(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11), (12, 13, 14, 15, 0, 1)]):
        layer = MoELayer(
            _V3, BACKENDS["plain"], placement, rank, prefix="mlp", storage=Storage(torch.float32, BACKENDS["plain"].runtime.device)
        )
        names = [weight.name for weight in layer.weights() if weight.name.endswith("down_proj.weight") and ".experts." in weight.name]
        assert names == [f"mlp.experts.{e}.down_proj.weight" for e in held]


def test_loads_are_counted_by_mode_and_moves_change_nothing():
    weights = hub_weights(theirs(_V3))
    placements = [initial_placement(_V3.num_experts, 1, 3)]
    rotated = tuple((log + 5) % _V3.num_experts for log in placements[0].phy2log)
    placements.append(Placement(_V3.num_experts, 1, rotated))
    layer, moved = (ours(_V3, weights, placement=placement) for placement in placements)
    assert layer.load is None
    layer.prepare_moves()
    chosen = {mode: torch.zeros(_V3.num_experts, dtype=torch.int64) for mode in ExpertMode}
    x = torch.randn(40, _V3.hidden_size)
    for mode, rows in ((ExpertMode.THROUGHPUT, 40), (ExpertMode.LOW_LATENCY, 3), (ExpertMode.LOW_LATENCY, 7), (ExpertMode.THROUGHPUT, 0)):
        before = layer.forward(Activation(x[:rows]), step(mode))
        chosen[mode] += torch.bincount(layer.route(x[:rows]).topk_idx.flatten(), minlength=_V3.num_experts)
        for tensor, other in zip(layer.expert_tensors(), moved.expert_tensors(), strict=True):
            tensor.copy_(other)
        layer.place(placements[1])
        assert layer.local.held == rotated and layer.placement == placements[1]
        assert_close(layer.forward(Activation(x[:rows]), step(mode)), before, (1e-5, 1e-6), "layer")
        chosen[mode] += torch.bincount(layer.route(x[:rows]).topk_idx.flatten(), minlength=_V3.num_experts)
    assert torch.equal(layer.load, torch.stack([chosen[ExpertMode.THROUGHPUT], chosen[ExpertMode.LOW_LATENCY]]))


def test_routed_scaling_does_not_touch_the_shared_expert():
    weights, x = hub_weights(theirs(_V3)), torch.randn(5, _V3.hidden_size)
    once = ours(dataclasses.replace(_V3, routed_scaling_factor=1.0), weights).forward(Activation(x), step(ExpertMode.THROUGHPUT))
    layer = ours(dataclasses.replace(_V3, routed_scaling_factor=3.0), weights)
    shared = layer.shared.forward(x)
    assert_close(layer.forward(Activation(x), step(ExpertMode.THROUGHPUT)), shared + 3.0 * (once - shared), (1e-4, 1e-5), "layer")
