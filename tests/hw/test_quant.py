"""Block-FP8 reference: hand-computed values first, then bounds that hold for any input."""

import pytest
import torch

from hw.quant import QuantTensor, dequantize, dequantize_slice, quantize_activation, quantize_weight_blocks, scale_shape

HALF_STEP = 2.0**-4  # e4m3 keeps 3 bits after the leading one, so rounding moves a normal number by at most 1/16 of it
SMALLEST = 2.0**-9  # spacing of e4m3 near zero, in units of the scale


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_weight_by_hand():
    # Two blocks of [1, 2]: amax 448 gives scale 1, amax 896 gives scale 2.
    w = torch.tensor([[448.0, -3.0, 896.0, 7.0]])
    q = quantize_weight_blocks(w, block=(1, 2))
    assert q.scale.tolist() == [[1.0, 2.0]]
    assert q.data.float().tolist() == [[448.0, -3.0, 448.0, 3.5]]
    assert dequantize(q).tolist() == w.tolist()


def test_rounding_is_to_the_nearest_of_eight_steps():
    # Between 16 and 32 e4m3 has steps of 2; 17 and 19 are ties and go to the even neighbour.
    q = quantize_activation(torch.tensor([[448.0, 17.0, 18.9, 19.0, 21.1]]))
    assert q.data.float().tolist() == [[448.0, 16.0, 18.0, 20.0, 22.0]]


def test_an_activation_by_hand():
    # Per token and per group: [T=2, K=4], group 2. Zeros take the floor 1e-4.
    x = torch.tensor([[224.0, 0.0, 0.0, 0.0], [1.0, -448.0, 2.0, 56.0]])
    q = quantize_activation(x, group=2)
    floor = torch.tensor(1e-4) / 448.0
    assert q.scale.tolist() == [[0.5, floor.item()], [1.0, 0.125]]
    assert q.data.float().tolist() == [[448.0, 0.0, 0.0, 0.0], [1.0, -448.0, 16.0, 448.0]]
    assert q.block == (1, 2)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (448.1, 2.0), (447.9, 1.0), (224.0, 0.5), (224.0001, 1.0), (1.0, 2.0**-8), (0.0, 2.0**-22), (448.0 * 2**20, 2.0**20)],
)
def test_ue8m0_rounds_the_scale_up_to_a_power_of_two(amax: float, scale: float):
    # 1 / 448 = 2^-8.8 goes to 2^-8; the floor 1e-4 / 448 = 2^-22.1 goes to 2^-22.
    q = quantize_activation(torch.tensor([[amax]]), ue8m0=True)
    assert q.scale.item() == scale
    assert q.format == "ue8m0"


def test_ue8m0_scales_fit_in_one_exponent_byte():
    q = quantize_weight_blocks(_random(300, 500) * 1e-2, ue8m0=True)
    byte = q.scale.to(torch.float8_e8m0fnu)
    assert torch.equal(byte.float(), q.scale)
    assert torch.equal(dequantize(QuantTensor(q.data, byte, "ue8m0")), dequantize(q))


def test_powers_of_two_scale_without_loss():
    # Values that e4m3 holds exactly stay exact under any power-of-two scale.
    exact = _random(128, 128).to(torch.float8_e4m3fn).float()
    exact[0, 0] = 448.0
    for exponent in (-20, -1, 0, 5):
        w = exact * 2.0**exponent
        assert torch.equal(dequantize(quantize_weight_blocks(w, ue8m0=True)), w)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (576, 512), (576, 200), (1, 1), (129, 127), (64, 640)])
def test_round_trip_error_is_within_half_a_step(shape: tuple[int, int], ue8m0: bool):
    w = _random(*shape)
    q = quantize_weight_blocks(w, ue8m0=ue8m0)
    scale = q.scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    bound = torch.maximum(w.abs() * HALF_STEP, scale * SMALLEST / 2) * (1 + 1e-6)
    assert ((dequantize(q) - w).abs() <= bound).all()
    assert q.scale.shape == scale_shape(shape, (128, 128))


def test_a_ragged_block_has_a_scale_of_its_own():
    w = torch.ones(576, 130)
    w[512:, :] = 1e3  # the last 64 rows
    w[:, 128:] *= 8.0  # the last two columns
    q = quantize_weight_blocks(w)
    assert q.scale.shape == (5, 2)
    torch.testing.assert_close(q.scale[3], torch.tensor([1.0, 8.0]) / 448.0)
    torch.testing.assert_close(q.scale[4], torch.tensor([1e3, 8e3]) / 448.0)
    torch.testing.assert_close(dequantize(q), w)


@pytest.mark.parametrize(
    ("rows", "cols"), [((0, 576), (0, 320)), ((128, 256), (128, 256)), ((100, 300), (5, 131)), ((570, 576), (300, 320))]
)
def test_a_slice_dequantises_to_the_slice_of_the_whole(rows: tuple[int, int], cols: tuple[int, int]):
    q = quantize_weight_blocks(_random(576, 320))
    part = q.data[slice(*rows), slice(*cols)]
    scale = q.scale[rows[0] // 128 :, cols[0] // 128 :]
    got = dequantize_slice(part, scale, q.block, (rows[0] % 128, cols[0] % 128))
    assert torch.equal(got, dequantize(q)[slice(*rows), slice(*cols)])


def test_dequantising_rounds_once():
    q = quantize_weight_blocks(_random(128, 128))
    assert torch.equal(dequantize(q, torch.bfloat16), dequantize(q).bfloat16())


def test_bfloat16_input_is_quantised_from_its_exact_values():
    x = _random(3, 256).bfloat16()
    assert torch.equal(quantize_activation(x).data.float(), quantize_activation(x.float()).data.float())


def test_a_scale_of_another_shape_is_an_error_of_ours():
    with pytest.raises(AssertionError, match="scale"):
        QuantTensor(torch.zeros(576, 128, dtype=torch.float8_e4m3fn), torch.ones(4, 1))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_experts_are_quantised_each_by_itself(ue8m0: bool):
    w = _random(3, 130, 200) * torch.tensor([1.0, 50.0, 0.02])[:, None, None]
    q = quantize_weight_blocks(w, (64, 128), ue8m0)
    assert q.data.shape == w.shape and q.scale.shape == scale_shape(w.shape, (64, 128)) == (3, 3, 2)
    for e in range(3):
        one = quantize_weight_blocks(w[e], (64, 128), ue8m0)
        assert torch.equal(q.expert(e).data.float(), one.data.float()) and torch.equal(q.expert(e).scale, one.scale)
        assert (q.expert(e).block, q.expert(e).format) == (one.block, one.format)
        assert torch.equal(dequantize(q)[e], dequantize(one))


def test_a_scale_without_its_experts_is_an_error_of_ours():
    with pytest.raises(AssertionError, match="scale"):
        QuantTensor(torch.zeros(2, 128, 128, dtype=torch.float8_e4m3fn), torch.ones(1, 1))
