"""The layer in both forms, over pages and in any chunks, against the paper's formula written out densely in float64."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from hw.api import LatentDims, Ops, Segments
from hw.cpu.ops import CpuOps
from hw.select import open_backend
from hw.testing import assert_close
from hw.weights import Storage
from mla.config import MLAConfig, YarnConfig
from mla.layer import MLALayer
from mla.metadata import AttnMetadata, DecodeMeta, PrefillMeta
from mla.rope import rope_table

CONFIG = MLAConfig(
    hidden_size=40, num_heads=4, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, q_lora_rank=20,
    rope_theta=100.0, max_position_embeddings=128, yarn=YarnConfig(4.0, 16, mscale=1.0, mscale_all_dim=0.7),
)  # fmt: skip
CONFIGS = {"q-lora": CONFIG, "no-q-lora": dataclasses.replace(CONFIG, q_lora_rank=None, yarn=None)}
PAGE_SIZE, MAX_LEN = 8, 96
PREFIX = "model.layers.0.self_attn"


class Naive(CpuOps):
    def prefers_absorbed(self, query_len, context_len, dims):
        return False


class Absorbed(CpuOps):
    def prefers_absorbed(self, query_len, context_len, dims):
        return True


FORMS: dict[str, Ops] = {
    "naive": Naive(),
    "absorbed": Absorbed(),
    "cheapest": open_backend("cpu").ops,
    "invariant": open_backend("cpu", batch_invariant=True).ops,
}

# A step is the decoding sequences, the tokens each of them brings, and the prefill chunks: sequence -> tokens.
Step = tuple[list[int], int, dict[int, int]]
STEPS: list[Step] = [
    ([], 0, {0: 5, 1: 16, 2: 1}),
    ([2], 1, {0: 3, 1: 7, 3: 9}),  # chunks behind prefixes that end on and off a page border, and one with none
    ([0, 1], 3, {3: 8, 2: 6}),
    ([3], 4, {1: 25}),
    ([0, 1, 2, 3], 2, {}),
    ([], 0, {2: 1, 0: 17}),
    ([1, 0], 1, {}),
]
# The same tokens, one decode step for each.
ONE_BY_ONE: list[Step] = [([0, 1, 2, 3], 1, {})] * 11 + [([0, 1, 3], 1, {})] * 12 + [([0, 1], 1, {})] * 8 + [([1], 1, {})] * 23


def weights_for(config: MLAConfig) -> dict[str, torch.Tensor]:
    layer = make_layer(config, FORMS["naive"], {})
    return {
        w.name: 1 + 0.1 * torch.randn(w.shape) if w.kind == "norm" else torch.randn(w.shape) * w.shape[-1] ** -0.5 for w in layer.weights()
    }


def make_layer(config: MLAConfig, ops: Ops, values: dict[str, torch.Tensor], dtype=torch.float32, **heads: int) -> MLALayer:
    device = torch.device("cpu")
    layer = MLALayer(config, ops, prefix=PREFIX, storage=Storage(dtype, device), table=rope_table(config, MAX_LEN, device), **heads)
    for weight in layer.weights() if values else []:
        weight.fill(values[weight.name][weight.index])
    return layer


def dense(config: MLAConfig, values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Attention over one whole sequence x `[S, hidden]`, by the hub's weights."""
    w = {name.removeprefix(PREFIX + ".").removesuffix(".weight"): value.double() for name, value in values.items()}
    n, r, v, heads, length = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.num_heads, len(x)

    def norm(y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    table = rope_table(config, length, torch.device("cpu")).double()
    turns = torch.complex(table[:, : r // 2], table[:, r // 2 :])[:, None]

    def rotate(y: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(y.reshape(length, -1, r // 2, 2).contiguous()) * turns).flatten(-2)

    x = x.double()
    q = x @ w["q_proj"].T if config.q_lora_rank is None else norm(x @ w["q_a_proj"].T, w["q_a_layernorm"]) @ w["q_b_proj"].T
    q_nope, q_rope = q.view(length, heads, n + r).split((n, r), dim=-1)
    latent, k_rope = (x @ w["kv_a_proj_with_mqa"].T).split((config.kv_lora_rank, r), dim=-1)
    k_nope, value = (norm(latent, w["kv_a_layernorm"]) @ w["kv_b_proj"].T).view(length, heads, n + v).split((n, v), dim=-1)
    scores = torch.einsum("thd,shd->hts", q_nope, k_nope) + torch.einsum("thd,sd->hts", rotate(q_rope), rotate(k_rope)[:, 0])
    scores = (scores * config.softmax_scale).masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value).flatten(1) @ w["o_proj"].T


class Cache:
    """Pages of four sequences, scattered, and how far each has come."""

    def __init__(self, config: MLAConfig, dtype: torch.dtype):
        pages = MAX_LEN // PAGE_SIZE
        self.entries = torch.randn(4 * pages, PAGE_SIZE, config.latent_dim).to(dtype)  # what earlier owners left behind
        self.page_table = torch.randperm(4 * pages).view(4, pages).int()
        self.lens = [0] * 4

    def table(self, seqs: list[int]) -> torch.Tensor:
        """Pages in use, one column of -1 more than needed."""
        used = [-(-self.lens[i] // PAGE_SIZE) for i in seqs]
        rows = self.page_table[seqs, : max(used) + 1].clone()
        rows[torch.arange(rows.shape[1]) >= torch.tensor(used)[:, None]] = -1
        return rows

    def advance(self, step: Step, padding: int = 0) -> tuple[AttnMetadata, list[tuple[int, int]]]:
        """Metadata of the next step, and which (sequence, position) each token is. `padding` rows decode nothing."""
        decoding, query_len, chunks = step
        tokens = []
        for i, count in itertools.chain(((i, query_len) for i in decoding), chunks.items()):
            tokens += [(i, self.lens[i] + j) for j in range(count)]
            self.lens[i] += count
        slots = [int(self.page_table[i, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE for i, p in tokens]
        positions = [p for _, p in tokens]
        decode = prefill = None
        if decoding:
            place, rows = len(decoding) * query_len, padding * query_len
            slots[place:place], positions[place:place], tokens[place:place] = [-1] * rows, [0] * rows, [(-1, 0)] * rows
            seq_lens = torch.tensor([self.lens[i] for i in decoding] + [0] * padding, dtype=torch.int32)
            page_table = torch.nn.functional.pad(self.table(decoding), (0, 0, 0, padding), value=-1)
            decode = DecodeMeta(len(decoding) + padding, query_len, seq_lens, int(seq_lens.max()), page_table)
        if chunks:
            lens, seqs = list(chunks.values()), list(chunks)
            starts = torch.tensor([0, *lens]).cumsum(0).int()
            seq_lens = torch.tensor([self.lens[i] for i in seqs], dtype=torch.int32)
            context = [self.lens[i] - chunks[i] for i in seqs]
            prefill = PrefillMeta(Segments(lens, starts), context, seq_lens, self.table(seqs))
        return AttnMetadata(torch.tensor(positions), torch.tensor(slots), decode, prefill), tokens


def whole(meta: AttnMetadata) -> list[int]:
    """No cuts."""
    return []


def run(
    layer: MLALayer, steps: list[Step], inputs: torch.Tensor, padding: int = 0, cuts: Callable[[AttnMetadata], list[int]] = whole
) -> torch.Tensor:
    """Outputs `[4, MAX_LEN, hidden]` of all tokens in the steps; inputs alike. Padding rows get the input of nobody.

    cuts: tokens before which a step is cut into parts.
    """
    cache, out = Cache(layer.config, inputs.dtype), torch.full_like(inputs, torch.nan)
    for step in steps:
        meta, tokens = cache.advance(step, padding)
        seqs, positions = torch.tensor(tokens).T
        edges = [0, *cuts(meta), len(tokens)]
        parts = [(slice(low, high), meta.part(low, high)) for low, high in itertools.pairwise(edges)]
        result = torch.cat([layer.forward(inputs[seqs, positions][some], part, cache.entries) for some, part in parts])
        out[seqs[seqs >= 0], positions[seqs >= 0]] = result[seqs >= 0]
    return out


def lens_of(steps: list[Step]) -> list[int]:
    return [sum(count * (i in decoding) + chunks.get(i, 0) for decoding, count, chunks in steps) for i in range(4)]


LENS = lens_of(STEPS)
assert lens_of(ONE_BY_ONE) == LENS


def compare(out: torch.Tensor, config: MLAConfig, values, inputs: torch.Tensor, tol: tuple[float, float]) -> None:
    for i, length in enumerate(LENS):
        assert_close(out[i, :length], dense(config, values, inputs[i, :length]), tol, f"sequence {i}")


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> MLAConfig:
    return CONFIGS[request.param]


@pytest.mark.parametrize("workspace", [1, 5, 8192])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_chunking_equals_the_dense_formula(form: str, config: MLAConfig, workspace: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mla.layer.WORKSPACE_TOKENS", workspace)
    values, inputs = weights_for(config), torch.randn(4, MAX_LEN, config.hidden_size)
    out = run(make_layer(config, FORMS[form], values), STEPS, inputs)
    compare(out, config, values, inputs, (1e-4, 1e-5))


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form: str, config: MLAConfig):
    values = {name: value.bfloat16().float() for name, value in weights_for(config).items()}
    inputs = torch.randn(4, MAX_LEN, config.hidden_size).bfloat16()
    out = run(make_layer(config, FORMS[form], values, torch.bfloat16), STEPS, inputs)
    assert out.dtype == torch.bfloat16
    compare(out, config, values, inputs, (0.05, 0.05))


@pytest.mark.parametrize("form", FORMS)
def test_one_token_at_a_time(form: str):
    values, inputs = weights_for(CONFIG), torch.randn(4, MAX_LEN, CONFIG.hidden_size)
    layer = make_layer(CONFIG, FORMS[form], values)
    slow = run(layer, ONE_BY_ONE, inputs)
    fast = run(layer, STEPS, inputs)
    for i, length in enumerate(LENS):
        assert_close(fast[i, :length], slow[i, :length], (1e-4, 1e-5), f"sequence {i}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_batch_invariant_ops_give_the_same_bits_in_any_chunking(dtype: torch.dtype):
    values, inputs = weights_for(CONFIG), torch.randn(4, MAX_LEN, CONFIG.hidden_size).to(dtype)
    layer = make_layer(CONFIG, FORMS["invariant"], values, dtype)
    slow, fast = run(layer, ONE_BY_ONE, inputs), run(layer, STEPS, inputs)
    for i, length in enumerate(LENS):
        assert torch.equal(fast[i, :length], slow[i, :length]), f"sequence {i}"


@pytest.mark.parametrize("form", FORMS)
def test_padding_rows_change_nothing(form: str):
    values, inputs = weights_for(CONFIG), torch.randn(4, MAX_LEN, CONFIG.hidden_size)
    layer = make_layer(CONFIG, FORMS[form], values)
    compare(run(layer, STEPS, inputs, padding=2), CONFIG, values, inputs, (1e-4, 1e-5))


def every_third(meta: AttnMetadata) -> list[int]:
    """As many cuts as there can be, a few tokens apart: decoding sequences stay whole, chunks do not."""
    query_len, num_decode = (1, 0) if meta.decode is None else (meta.decode.query_len, meta.decode.num_tokens)
    return [*range(0, num_decode, query_len), *range(num_decode, len(meta.positions), 3), len(meta.positions)]


@pytest.mark.parametrize("cuts", [lambda meta: [meta.middle()], every_third], ids=["middle", "every third"])
@pytest.mark.parametrize("form", FORMS)
def test_a_step_in_parts_is_the_step(form: str, cuts: Callable[[AttnMetadata], list[int]]):
    values, inputs = weights_for(CONFIG), torch.randn(4, MAX_LEN, CONFIG.hidden_size)
    layer = make_layer(CONFIG, FORMS[form], values)
    compare(run(layer, STEPS, inputs, padding=1, cuts=cuts), CONFIG, values, inputs, (1e-4, 1e-5))


@pytest.mark.parametrize(
    ("step", "middle"),
    [
        (([], 0, {0: 8, 1: 7}), 8),  # the edge is nearer to the middle than a cut chunk is worth
        (([], 0, {0: 12, 1: 2}), 7),
        (([], 0, {0: 16}), 8),
        (([0, 1, 2], 2, {}), 2),
        (([0], 1, {}), 1),
        (([0, 1, 2, 3], 2, {3: 3}), 6),
        (([0, 1], 2, {3: 12}), 8),
    ],
)
def test_where_a_step_is_cut(step: Step, middle: int):
    meta, _ = Cache(CONFIG, torch.float32).advance(step)
    assert meta.middle() == middle


@pytest.mark.parametrize("parts", [(2, 2), (1, 3)])
@pytest.mark.parametrize("form", ["naive", "absorbed"])
def test_heads_of_all_ranks_add_up_to_the_layer(form: str, config: MLAConfig, parts: tuple[int, ...]):
    values, inputs = weights_for(config), torch.randn(4, MAX_LEN, config.hidden_size)
    total, first = torch.zeros_like(inputs), 0
    for num_heads in parts:
        total += run(make_layer(config, FORMS[form], values, first_head=first, num_heads=num_heads), STEPS, inputs)
        first += num_heads
    compare(total, config, values, inputs, (1e-4, 1e-5))


def test_a_step_writes_its_own_slots_only():
    values, inputs = weights_for(CONFIG), torch.randn(4, MAX_LEN, CONFIG.hidden_size)
    layer, cache = make_layer(CONFIG, FORMS["naive"], values), Cache(CONFIG, torch.float32)
    for step in STEPS:
        meta, tokens = cache.advance(step)
        before = cache.entries.clone()
        seqs, positions = torch.tensor(tokens).T
        layer.forward(inputs[seqs, positions], meta, cache.entries)
        changed = (cache.entries != before).any(-1).flatten().nonzero()[:, 0]
        assert changed.tolist() == meta.slots.sort().values.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_a_step_without_tokens(form: str):
    layer, cache = make_layer(CONFIG, FORMS[form], weights_for(CONFIG)), Cache(CONFIG, torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    out = layer.forward(torch.zeros(0, CONFIG.hidden_size), AttnMetadata(none, none, None, None), cache.entries)
    assert out.shape == (0, CONFIG.hidden_size)


def test_the_weights_cover_the_layer_once(config: MLAConfig):
    layer = make_layer(config, FORMS["naive"], {})
    storages = (layer.down, layer.q_up, layer.q_norm, layer.kv_norm, layer.kv_up, layer.out)
    for tensor in storages:
        if tensor is not None:
            tensor.fill_(torch.nan)
    for weight in layer.weights():
        assert weight.target.isnan().all(), f"{weight.name} overlaps another weight"
        weight.fill(torch.zeros(weight.slice_shape))
    assert not any(tensor.isnan().any() for tensor in storages if tensor is not None)


def test_the_cheaper_form_on_cpu():
    ops, v3 = open_backend("cpu").ops, LatentDims(512, 128, 64, 128)
    assert ops.prefers_absorbed(1, 4096, v3)
    assert ops.prefers_absorbed(100, 4096, v3)
    assert not ops.prefers_absorbed(4096, 4096, v3)
    assert not ops.prefers_absorbed(1, 0, v3)
