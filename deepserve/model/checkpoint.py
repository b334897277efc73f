"""Reading a folder of safetensors: what is in it, slices of it, and filling a model's storages from it, strictly.

Files are memory-mapped, so a rank touches only the bytes it holds. Block-FP8 matrices are dequantised as they are read.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepserve.model.config import FP8BlockConfig, ModelConfig
from hw.quant import QuantTensor, dequantize_slice, scale_shape
from hw.weights import Weight

INDEX_NAME = "model.safetensors.index.json"
SCALE_SUFFIX = "_scale_inv"  # multiplies, despite its name
FP8 = "F8_E4M3"
# A tensor of another dtype holds no plain values: packed integers of an unknown quantisation, for example.
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")
MAX_LISTED = 20
PROGRESS_BYTES = 1 << 30  # a shorter load is over before a bar says anything

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(?:gate|up|down)_proj\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class CheckpointError(ValueError):
    """A checkpoint that is damaged or does not hold the model it should."""


class Checkpoint:
    """The tensors of one folder by name. Names come from the index; a shard is opened when something in it is asked for."""

    def __init__(self, folder: str | Path, quantization: FP8BlockConfig | None = None):
        self.folder = Path(folder)
        self.quantization = quantization
        self._open_files: dict[str, Any] = {}
        self._file_of = self._find_files()

    def _find_files(self) -> dict[str, str]:
        index_path = self.folder / INDEX_NAME
        if index_path.exists():
            try:
                file_of = dict(json.loads(index_path.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index_path} is not an index of safetensors files: {error!r}") from None
            for file in set(file_of.values()):
                if not isinstance(file, str) or Path(file).name != file:
                    raise CheckpointError(f"{index_path} names a file outside its folder: {file!r}")
                if not (self.folder / file).exists():
                    raise CheckpointError(f"{index_path} names {file}, which is missing from the folder")
            return file_of
        # Repositories that hold a second copy in another layout keep the one for `transformers` under this name.
        names = ["model.safetensors"] if (self.folder / "model.safetensors").exists() else None
        names = names or sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(f"{self.folder} holds no *.safetensors files")
        file_of: dict[str, str] = {}
        for file in names:
            for name in self._open(file).keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                if name in file_of:
                    raise CheckpointError(f"{name} is in both {file_of[name]} and {file} of {self.folder}, which has no {INDEX_NAME}")
                file_of[name] = file
        return file_of

    def _open(self, file: str) -> Any:
        if file not in self._open_files:
            path = self.folder / file
            try:
                self._open_files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is truncated or not a safetensors file: {error}") from None
        return self._open_files[file]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder / file} does not hold {name}, though {INDEX_NAME} says so: {error}") from None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def file_of(self, name: str) -> str:
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors writes it: "BF16", "F32", "F8_E4M3"."""
        return self._slice(name).get_dtype()

    def problem(self, name: str) -> str | None:
        """Why `read` cannot give the values of a tensor that is here, or None if it can."""
        dtype = self.dtype(name)
        if dtype in PLAIN_DTYPES:
            return None
        if dtype != FP8:
            return f"{name} is stored as {dtype}, which is not supported"
        if self.quantization is None:
            return f"{name} is float8, but the config has no quantization_config"
        scale, shape = name + SCALE_SUFFIX, self.shape(name)
        if scale not in self:
            return f"{name} is float8 and has no {scale}"
        if len(shape) != 2:
            return f"{name} is float8 of shape {list(shape)}, only matrices have block scales"
        expected, dtype = scale_shape(shape, self._block), self.dtype(scale)
        if self.shape(scale) != expected or dtype not in SCALE_DTYPES:
            return f"{scale} is {dtype} {list(self.shape(scale))}, a float8 matrix {list(shape)} needs {list(expected)}"
        return None

    @property
    def _block(self) -> tuple[int, int]:
        assert self.quantization is not None
        return self.quantization.block_n, self.quantization.block_k

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """A tensor, or the part at `index`, in its own dtype; float8 comes back dequantised to fp32. Do not write to it.

        Raises CheckpointError if it is not here or `problem` finds fault with it.
        """
        if name not in self:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        problem = self.problem(name)
        if problem is not None:
            raise CheckpointError(f"{self.folder}: {problem}")
        if self.dtype(name) != FP8:
            return self.raw(name, index)
        data, scale, origin = self._blocks(name, index)
        return dequantize_slice(data, scale, self._block, origin)

    def read_quantized(self, name: str, index: tuple[slice, ...] = ()) -> QuantTensor | torch.Tensor:
        """Like `read`, but float8 stays as it is. The part begins and ends at edges of blocks or of the tensor."""
        if name not in self or self.dtype(name) != FP8 or self.problem(name):
            return self.read(name, index)
        data, scale, origin = self._blocks(name, index)
        assert origin == (0, 0), f"{name}: part {index} cuts a block"
        assert self.quantization is not None
        return QuantTensor(data, scale.float(), self.quantization.scale_format, self._block)

    def _blocks(self, name: str, index: tuple[slice, ...]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int]]:
        """Data of a part, the scales of all blocks that it touches, and where within the first of them it begins."""
        parts = index + (slice(None),) * (2 - len(index))
        scale_parts, origin = [], []
        for part, size, block in zip(parts, self.shape(name), self._block, strict=True):
            start, stop, _ = part.indices(size)
            scale_parts.append(slice(start // block, max(start // block, -(-stop // block))))
            origin.append(start % block)
        return self.raw(name, index), self.raw(name + SCALE_SUFFIX, tuple(scale_parts)), (origin[0], origin[1])

    def raw(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """As stored, float8 without its scale: a read-only view of the mapped file."""
        tensor = self._slice(name)
        return tensor[index] if index else self._open(self._file_of[name]).get_tensor(name)

    def close(self) -> None:
        """Unmap the files. Tensors that `read` returned stay valid."""
        self._open_files.clear()


def load_weights(
    weights: Iterable[Weight], checkpoint: Checkpoint, *, ignored: Callable[[str], bool], progress: bool | None = None
) -> None:
    """Fill every target from the checkpoint, or raise one CheckpointError that names all that does not fit.

    `ignored` says which tensors may be left over: those the model knows and this rank does not hold. Nothing is written
    unless everything fits. `progress` None: a bar when stderr is a terminal and the load is long.
    """
    ordered = list(weights)
    _check(ordered, checkpoint, ignored)
    # File by file, so that a spinning or remote disk is read in order; replicas of one tensor are read once.
    ordered.sort(key=lambda w: (checkpoint.file_of(w.name), w.name, str(w.index)))
    with _progress_bar(sum(w.target.nbytes for w in ordered), progress) as advance:
        for (name, _), replicas in groupby(ordered, key=lambda w: (w.name, str(w.index))):
            value: torch.Tensor | QuantTensor | None = None
            for weight in replicas:
                if value is None:
                    read = checkpoint.read_quantized if isinstance(weight.target, QuantTensor) else checkpoint.read
                    value = read(name, weight.index)
                weight.fill(value)
                advance(weight.target.nbytes)


def _check(weights: list[Weight], checkpoint: Checkpoint, ignored: Callable[[str], bool]) -> None:
    missing, misshapen, unreadable = {}, {}, {}  # dicts: replicas share a name and are told once
    claimed = {weight.name for weight in weights}
    for weight in weights:
        if weight.name not in checkpoint:
            missing[weight.name] = weight.name
        elif checkpoint.shape(weight.name) != tuple(weight.shape):
            stored = list(checkpoint.shape(weight.name))
            misshapen[weight.name] = f"{weight.name} is {stored} in the checkpoint, {list(weight.shape)} in the model"
        elif problem := checkpoint.problem(weight.name):
            unreadable[weight.name] = problem
    left_over = []
    for name in sorted(checkpoint.names - claimed):
        base = name.removesuffix(SCALE_SUFFIX)
        is_partner = base != name and base in claimed and base in checkpoint and checkpoint.dtype(base) == FP8
        if not is_partner and not ignored(base):
            left_over.append(name)
    found = {"missing": missing.values(), "left over": left_over, "of another shape": misshapen.values(), "unreadable": unreadable.values()}
    if any(found.values()):
        lines = [_listing(kind, list(items)) for kind, items in found.items() if items]
        raise CheckpointError("\n  ".join([f"{checkpoint.folder} does not fit the model:", *lines]))


def _listing(kind: str, items: list[str]) -> str:
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return f"{len(items)} {kind}: {', '.join(items[:MAX_LISTED])}{more}"


@contextmanager
def _progress_bar(total_bytes: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    if not (sys.stderr.isatty() and total_bytes >= PROGRESS_BYTES if wanted is None else wanted):
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def known_names(config: ModelConfig) -> Callable[[str], bool]:
    """For `load_weights(ignored=)`: tensors that belong to this architecture though a rank may not hold them.

    These are experts of other ranks, MTP modules, rotary tables of old checkpoints, and the stored copy of a tied head.
    """

    def known(name: str) -> bool:
        if name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight"):
            return True
        if layer := _LAYER.match(name):
            if config.mtp.owns(int(layer[1])):
                return True
            if config.moe is not None and (expert := _EXPERT.fullmatch(name)):
                return config.is_moe_layer(int(expert[1])) and int(expert[2]) < config.moe.num_experts
        return False

    return known


def dummy_weights(weights: Iterable[Weight], seed: int) -> None:
    """Fill every target with seeded random values of a sane size, so that no checkpoint is needed.

    A whole tensor is drawn from its name and the seed, then sliced: the same model whatever the ranks and the sharding.
    """
    ordered = sorted(weights, key=lambda w: w.name)
    for _, replicas in groupby(ordered, key=lambda w: w.name):
        value: torch.Tensor | None = None
        for weight in replicas:
            value = _dummy(weight, seed) if value is None else value
            weight.fill(value[weight.index] if weight.index else value)


def _dummy(weight: Weight, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {weight.name}".encode()).digest()
    device = weight.target.data.device  # drawn where it stays: a large model would take hours on the host
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))
    noise = torch.randn(weight.shape, generator=generator, device=device)
    if weight.kind == "norm":
        return 1.0 + 0.1 * noise
    if weight.kind == "gate_bias":
        return 0.02 * noise
    # Variance 1 / fan_in keeps the variance of what passes through.
    return noise * (weight.shape[-1] ** -0.5)


def fingerprint(folder: str | Path) -> str:
    """Identifies a model among instances that exchange caches: its config, its tensors' names, dtypes and shapes, and a
    sample of values. Cheap: it reads file headers and a few kilobytes. Two fine-tunes that share the sample look alike.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("_name_or_path", "transformers_version"):  # where it was saved from, not what it is
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    if any(folder.glob("*.safetensors")):
        checkpoint = Checkpoint(folder)
        for name in sorted(checkpoint.names):
            digest.update(f"{name} {checkpoint.dtype(name)} {checkpoint.shape(name)}\n".encode())
        for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"):
            if name in checkpoint:
                digest.update(checkpoint.raw(name, (slice(0, 1),) if len(checkpoint.shape(name)) > 1 else ()).float().numpy().tobytes())
    return digest.hexdigest()
