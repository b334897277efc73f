"""What is compiled ahead for a model on a GPU, and how it is remembered; nothing is compiled here."""

import json

import pytest
import torch

from hw.api import Unsupported
from hw.cpu.reference.ops import ReferenceOps
from hw.cuda.kernel_cache import KernelCache
from hw.cuda.warm_up import run_product, tile_rows, wanted
from hw.rules import Decode, ModelShapes
from tests.hw.test_rules import fp8


def shapes(**changes) -> ModelShapes:
    decode = Decode(torch.bfloat16, 1, 1, 2, 512, 64, 64, 100)
    head, expert = torch.empty(256, 128, device="meta"), fp8(4, 256, 128)
    values = {"products": {"down": fp8(192, 128), "experts": expert, "head": head}, "top_k": 2, "max_rows": 200, "max_low_latency_rows": 70}
    return ModelShapes(**{"dtype": torch.bfloat16, "decode": decode, **values, **changes})


def test_products_that_are_compiled_at_the_row_counts_that_matter():
    """Those at which DeepGEMM does them; who does the smallest ones is measured, and changes."""
    found = {tuple(json.loads(name)[:1] + json.loads(name)[2]): rows for name, rows in wanted(shapes()).items()}
    assert found.keys() == {("linear", 192, 128), ("masked", 4, 256, 128), ("grouped", 4, 256, 128)}
    assert {128, 192, 256} <= found["linear", 192, 128] <= {16, 32, 64, 128, 192, 256}
    assert {128} <= found["masked", 4, 256, 128] <= {16, 32, 64, 128}
    # 200 tokens twice, and up to 127 rows of gaps behind each expert.
    assert found["grouped", 4, 256, 128] == {128 * i for i in range(1, 8)}
    assert wanted(shapes(dtype=torch.float32)) == {}


@pytest.mark.parametrize("most", [1, 63, 64, 65, 2048])
def test_every_number_of_tiles_is_met(most: int):
    """DeepGEMM chooses by numbers of tiles; whatever the row count, one that gives the same numbers has run."""
    met = tile_rows(most)
    for rows in range(1, most + 1):
        tiles = [-(-rows // height) for height in (64, 128, 256)]
        low = (rows <= 16, rows <= 32)
        assert any([-(-m // height) for height in (64, 128, 256)] == tiles and (m <= 16, m <= 32) == low for m in met), rows


def test_what_is_wanted_can_be_run():
    products = {"down": fp8(192, 128), "experts": fp8(4, 256, 128)}
    for name, row_counts in wanted(shapes(products=products)).items():
        run_product(ReferenceOps(), name, sorted(row_counts), torch.device("cpu"))


def test_a_folder_remembers(tmp_path):
    cache = KernelCache(str(tmp_path / "a" / "b"), ("card", 1))
    assert cache.lacking({"x": {1, 2}, "y": {3}}) == {"x": {1, 2}, "y": {3}}
    with cache.locked():
        cache.note({"x": {1}, "y": {3}})
        cache.note({"x": {5}})
    assert cache.lacking({"x": {1, 2, 5}, "y": {3}}) == {"x": {2}}
    assert KernelCache(str(tmp_path / "a" / "b"), ("card", 1)).lacking({"x": {1, 5}}) == {}
    assert KernelCache(str(tmp_path / "a" / "b"), ("other card", 1)).lacking({"x": {1}}) == {"x": {1}}


def test_a_folder_that_was_cut_off_or_cannot_be_made(tmp_path):
    cache = KernelCache(str(tmp_path), ())
    cache.note({"x": {1}})
    (note,) = tmp_path.rglob("compiled-*")
    note.write_text("{")
    assert cache.lacking({"x": {1}}) == {"x": {1}}
    (tmp_path / "file").write_text("")
    with pytest.raises(Unsupported, match="file/kernels cannot be made: Not a directory"):
        KernelCache(str(tmp_path / "file" / "kernels"), ())
