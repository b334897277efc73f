"""Checkpoints: every tensor arrives where it should, and every kind of misfit is refused with its name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepserve.model.checkpoint import INDEX_NAME, Checkpoint, CheckpointError, fingerprint, known_names, load_weights
from deepserve.model.config import FP8BlockConfig, ModelConfig
from deepserve.model.hub import SHIPPED_FOLDER
from hw.quant import QuantTensor, dequantize, quantize_weight_blocks
from hw.weights import Weight
from tests.deepserve.tiny_models import KINDS, dequantized, to_fp8, weights_of

FP8 = FP8BlockConfig(128, 128, "fp32")


def _nothing(name: str) -> bool:
    return False


def _weight(name: str, *shape: int, index: tuple[slice, ...] = (), dtype: torch.dtype = torch.float32) -> Weight:
    part = torch.empty(shape, device="meta")[index]
    return Weight(name=name, shape=shape, target=torch.full(part.shape, torch.nan, dtype=dtype), index=index)


def _saved(folder: Path, tensors: dict[str, torch.Tensor], quantization: FP8BlockConfig | None = None) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder, quantization)


def _sharded(source: Path, folder: Path, num_shards: int = 3) -> Path:
    tensors = load_file(source / "model.safetensors")
    weight_map = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# --- whole models


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_transformers_saved_fills_the_model(kind: str, tiny_model):
    folder = tiny_model(kind)
    config = ModelConfig.from_folder(folder)
    weights = weights_of(config)
    load_weights(weights, Checkpoint(folder), ignored=_nothing)  # so: no name left over, none missing
    stored = load_file(folder / "model.safetensors")
    for weight in weights:
        assert torch.equal(weight.target, stored[weight.name]), weight.name


def test_the_shipped_model_fills_the_model_and_leaves_its_mtp_module():
    config = ModelConfig.from_folder(SHIPPED_FOLDER)
    checkpoint = Checkpoint(SHIPPED_FOLDER)
    weights = weights_of(config)
    load_weights(weights, checkpoint, ignored=known_names(config))
    assert not any(weight.target.isnan().any() for weight in weights)
    left = checkpoint.names - {weight.name for weight in weights}
    assert left and all(name.startswith(f"model.layers.{config.num_layers}.") for name in left)
    with pytest.raises(CheckpointError, match=f"{len(left)} left over: model.layers.{config.num_layers}"):
        load_weights(weights, checkpoint, ignored=_nothing)


def test_shards_equal_the_single_file(tiny_model, tmp_path: Path):
    folder = tiny_model("v3")
    config = ModelConfig.from_folder(folder)
    whole, sharded = weights_of(config), weights_of(config)
    load_weights(whole, Checkpoint(folder), ignored=_nothing)
    load_weights(sharded, Checkpoint(_sharded(folder, tmp_path)), ignored=_nothing)
    for one, other in zip(whole, sharded, strict=True):
        assert torch.equal(one.target, other.target)
    (tmp_path / INDEX_NAME).unlink()  # shards without an index are read too
    assert Checkpoint(tmp_path).names == Checkpoint(folder).names


@pytest.mark.parametrize("scales", ["fp32", "ue8m0", "ue8m0 as bytes"])
@pytest.mark.parametrize("block", [(128, 128), (16, 24)], ids=str)
def test_an_fp8_model_equals_its_dequantised_copy(scales: str, block: tuple[int, int], tiny_model, tmp_path: Path):
    source = tiny_model("v3")
    folder = to_fp8(source, tmp_path / "fp8", block, ue8m0=scales != "fp32", e8m0_dtype=scales == "ue8m0 as bytes")
    config = ModelConfig.from_folder(folder)
    assert config.quantization == FP8BlockConfig(*block, scales.split()[0])
    weights = weights_of(config)
    load_weights(weights, Checkpoint(folder, config.quantization), ignored=_nothing)
    expected = load_file(dequantized(folder, tmp_path / "fp32") / "model.safetensors")
    original = load_file(source / "model.safetensors")
    for weight in weights:
        assert torch.equal(weight.target, expected[weight.name]), weight.name
        if "proj" in weight.name:
            error = (weight.target - original[weight.name]).abs().max() / original[weight.name].abs().max()
            assert 0 < error <= 1 / 16, weight.name  # quantised indeed, and by no more than half a step of e4m3


# --- slices


def test_slices_and_views(tmp_path: Path):
    stored = torch.randn(12, 10)
    checkpoint = _saved(tmp_path, {"w": stored})
    rows, columns = _weight("w", 12, 10, index=(slice(3, 7),)), _weight("w", 12, 10, index=(slice(None), slice(4, None)))
    both = _weight("w", 12, 10, index=(slice(0, 6), slice(0, 5)), dtype=torch.bfloat16)
    storage = torch.zeros(2, 24, 10)
    heads = Weight(name="w", shape=(12, 10), target=storage[1, :12].view(3, 4, 10))  # another shape of as many elements
    load_weights([rows, columns, both, heads], checkpoint, ignored=_nothing)
    assert torch.equal(rows.target, stored[3:7])
    assert torch.equal(columns.target, stored[:, 4:])
    assert torch.equal(both.target, stored[:6, :5].bfloat16())
    assert torch.equal(storage[1, :12], stored)
    assert not storage[0].any() and not storage[1, 12:].any()


def test_replicas_are_all_filled(tmp_path: Path):
    stored = torch.randn(4, 4)
    replicas = [_weight("expert", 4, 4) for _ in range(3)]
    load_weights(replicas, _saved(tmp_path, {"expert": stored}), ignored=_nothing)
    assert all(torch.equal(weight.target, stored) for weight in replicas)


_SLICES = [
    (),
    (slice(128, 384), slice(128, 256)),
    (slice(0, 192),),
    (slice(192, 384),),
    (slice(100, 131), slice(250, 300)),
    (slice(None), slice(127, 129)),
    (slice(512, 576), slice(256, 300)),
    (slice(575, 576), slice(299, 300)),
    (slice(5, 5),),
]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("index", _SLICES, ids=str)
def test_an_fp8_slice_is_the_slice_of_the_whole(index: tuple[slice, ...], scale_dtype: torch.dtype, tmp_path: Path):
    # 576 x 300: ragged last blocks both ways, and slices at, across and inside block edges.
    q = quantize_weight_blocks(torch.randn(576, 300) * torch.logspace(-3, 3, 576)[:, None], ue8m0=True)
    q = QuantTensor(q.data, q.scale.to(scale_dtype), "ue8m0")
    checkpoint = _saved(tmp_path, {"w": q.data, "w_scale_inv": q.scale}, FP8)
    assert torch.equal(checkpoint.read("w", index), dequantize(q)[index] if index else dequantize(q))


def test_a_scalar_is_read(tmp_path: Path):
    assert _saved(tmp_path, {"x": torch.tensor(3.0)}).read("x").item() == 3.0


# --- misfits


def test_all_misfits_are_told_at_once_and_nothing_is_written(tmp_path: Path):
    checkpoint = _saved(
        tmp_path, {"a": torch.ones(2, 3), "b": torch.ones(4), "left.one": torch.ones(1), "packed": torch.ones(2, dtype=torch.int32)}
    )
    weights = [_weight("a", 3, 2), _weight("b", 4), _weight("c", 5), _weight("c", 5), _weight("packed", 2)]
    with pytest.raises(CheckpointError) as error:
        load_weights(weights, checkpoint, ignored=_nothing)
    assert str(error.value).splitlines() == [
        f"{tmp_path} does not fit the model:",
        "  1 missing: c",
        "  1 left over: left.one",
        "  1 of another shape: a is [2, 3] in the checkpoint, [3, 2] in the model",
        "  1 unreadable: packed is stored as I32, which is not supported",
    ]
    assert all(weight.target.isnan().all() for weight in weights)


def test_long_lists_are_cut_and_counted(tmp_path: Path):
    checkpoint = _saved(tmp_path, {"a": torch.ones(1)})
    weights = [_weight(f"w{i:02}", 1) for i in range(25)]
    with pytest.raises(CheckpointError, match=r"25 missing: w00, .*w19 and 5 more"):
        load_weights(weights, checkpoint, ignored=lambda name: name == "a")


@pytest.mark.parametrize(
    ("tensors", "quantization", "message"),
    [
        ({"w": (256, 128)}, FP8, "1 unreadable: w is float8 and has no w_scale_inv"),
        ({"w": (256, 128), "w_scale_inv": (2, 1)}, None, "w is float8, but the config has no quantization_config"),
        ({"w": (256, 128), "w_scale_inv": (1, 2)}, FP8, r"w_scale_inv is F32 \[1, 2\], a float8 matrix \[256, 128\] needs \[2, 1\]"),
        ({"w": (256, 128), "w_scale_inv": (1,)}, FP8, r"w_scale_inv is F32 \[1\]"),
        ({"w": (256,), "w_scale_inv": (2,)}, FP8, r"w is float8 of shape \[256\]"),
        ({"w": (256, 128), "w_scale_inv": (2, 1), "v_scale_inv": (1,)}, FP8, "1 left over: v_scale_inv"),
    ],
)
def test_bad_scales(tensors: dict[str, tuple[int, ...]], quantization: FP8BlockConfig | None, message: str, tmp_path: Path):
    dtypes = {"w": torch.float8_e4m3fn}
    checkpoint = _saved(
        tmp_path, {name: torch.ones(shape).to(dtypes.get(name, torch.float32)) for name, shape in tensors.items()}, quantization
    )
    with pytest.raises(CheckpointError, match=message):
        load_weights([_weight("w", *tensors["w"])], checkpoint, ignored=_nothing)


def test_a_scale_beside_a_plain_tensor_is_left_over(tmp_path: Path):
    checkpoint = _saved(tmp_path, {"w": torch.ones(2, 2), "w_scale_inv": torch.ones(1, 1)}, FP8)
    with pytest.raises(CheckpointError, match="1 left over: w_scale_inv"):
        load_weights([_weight("w", 2, 2)], checkpoint, ignored=_nothing)


def test_reading_what_is_not_there(tmp_path: Path):
    checkpoint = _saved(tmp_path, {"w": torch.ones(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError, match="no tensor v"):
        checkpoint.read("v")
    with pytest.raises(CheckpointError, match="no quantization_config"):
        checkpoint.read("w")


def test_which_names_a_model_knows(tiny_model):
    known = known_names(ModelConfig.from_folder(SHIPPED_FOLDER))  # 6 layers, the first dense, 32 experts, one MTP module
    for name in (
        "model.layers.1.mlp.experts.31.gate_proj.weight",
        "model.layers.6.eh_proj.weight",
        "model.layers.6.mlp.experts.0.up_proj.weight",
        "model.layers.3.self_attn.rotary_emb.inv_freq",
    ):
        assert known(name), name
    for name in (
        "model.layers.1.mlp.experts.32.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.experts.0.gate_proj.bias",
        "model.layers.7.eh_proj.weight",
        "model.layers.2.self_attn.indexer.wk.weight",
        "lm_head.weight",
        "model.norm.bias",
    ):
        assert not known(name), name


def test_a_rank_that_holds_some_experts_loads_beside_the_others_fp8_scales(tiny_model, tmp_path: Path):
    folder = to_fp8(tiny_model("v3"), tmp_path)
    config = ModelConfig.from_folder(folder)
    held = [w for w in weights_of(config) if ".experts." not in w.name or ".experts.3." in w.name]
    load_weights(held, Checkpoint(folder, config.quantization), ignored=known_names(config))
    assert not any(weight.target.isnan().any() for weight in held)


# --- damaged folders


def test_a_truncated_shard_is_named(tiny_model, tmp_path: Path):
    folder = _sharded(tiny_model("v3"), tmp_path)
    broken = folder / "model-00002-of-00003.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    config = ModelConfig.from_folder(tiny_model("v3"))
    with pytest.raises(CheckpointError, match=f"{broken} is truncated"):
        load_weights(weights_of(config), Checkpoint(folder), ignored=_nothing)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\0" * 64])
def test_a_file_that_is_no_safetensors_is_named(content: bytes, tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or not a safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ("{}", "not an index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"names gone\.safetensors, which is missing"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"a": 1}}', "outside its folder"),
    ],
)
def test_a_bad_index_is_named(index: str, message: str, tmp_path: Path):
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"x\.safetensors does not hold b"):
        load_weights([_weight("a", 1), _weight("b", 1)], Checkpoint(tmp_path), ignored=_nothing)


def test_two_files_with_one_name_need_an_index(tmp_path: Path):
    for file in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / file)
    with pytest.raises(CheckpointError, match=r"a is in both x\.safetensors and y\.safetensors"):
        Checkpoint(tmp_path)


def test_an_empty_folder_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path} holds no \*\.safetensors"):
        Checkpoint(tmp_path)


# --- fingerprint and progress


def test_fingerprints_tell_models_apart(tiny_model, tmp_path: Path):
    folder = tiny_model("v3")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    empty = fingerprint(tmp_path)  # dummy weights need no tensors
    _sharded(folder, tmp_path)
    assert fingerprint(folder) == fingerprint(tmp_path) != empty  # sharding does not matter
    assert fingerprint(folder) != fingerprint(tiny_model("v3", seed=1))
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert fingerprint(folder) == fingerprint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"routed_scaling_factor": 3.0}))
    assert fingerprint(folder) != fingerprint(tmp_path)


def test_a_progress_bar_only_when_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint = _saved(tmp_path, {"a": torch.ones(4)})
    load_weights([_weight("a", 4)], checkpoint, ignored=_nothing)
    assert capsys.readouterr().err == ""
    load_weights([_weight("a", 4)], checkpoint, ignored=_nothing, progress=True)


def test_values_outlive_the_checkpoint(tmp_path: Path):
    checkpoint = _saved(tmp_path, {"a": torch.arange(1000.0)})
    value = checkpoint.read("a", (slice(10, 20),))
    checkpoint.close()
    assert value.tolist() == list(range(10, 20))
    assert checkpoint.read("a").sum().item() == 499500.0  # opened again on demand
