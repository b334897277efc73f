"""Bytes that a cache declaration adds up to, worked out by hand."""

import pytest

from hw.cache_spec import DTYPE_BYTES, CacheSpec, LayerCache, PagedEntry, StateEntry

LATENT = PagedEntry("latent", (576,), "bfloat16")
INDEX_KEY = PagedEntry("index_key", (128,), "float8_e4m3fn")
COMPRESSED = PagedEntry("compressed", (2, 8), "float32", tokens_per_entry=4)
WINDOW = StateEntry("window", (128, 16), "bfloat16")


def test_entry_bytes():
    assert LATENT.entry_bytes == 1152
    assert INDEX_KEY.entry_bytes == 128
    assert COMPRESSED.entry_bytes == 64
    assert WINDOW.state_bytes == 4096


def test_a_model_adds_up_its_layers():
    spec = CacheSpec((LayerCache((LATENT,)), LayerCache((LATENT, INDEX_KEY)), LayerCache((COMPRESSED,), (WINDOW,)), LayerCache()))
    assert spec.bytes_per_token == 1152 + 1280 + 16
    assert spec.page_bytes(64) == 64 * (1152 + 1280 + 16)
    assert spec.state_bytes == 4096


def test_a_page_must_hold_whole_entries():
    spec = CacheSpec((LayerCache((COMPRESSED,)),))
    assert spec.page_bytes(4) == 64
    with pytest.raises(ValueError, match=r"page size 6 is no multiple of 4.*'compressed'"):
        spec.page_bytes(6)


def test_bytes_of_every_dtype_are_torchs():
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES
