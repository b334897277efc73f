"""Bring experts to where a plan wants them, while serving: a few layers at a time, in slices between steps, in place.

Every rank makes the same `Migration` from the same plan and calls `advance()` at the same points, between two steps. A call moves one
slice. What arrives waits in a buffer, so steps go on with the old weights and the old placement; once all of a batch of layers has arrived
on every rank, the call copies it into the slots and returns these layers, and from then on their new placements hold:

    slices       |1|2|3|      |1|2|               a rank sends and receives at most `slice_bytes` in a slice
    steps      ..|  |  |  |...                    old placement
    layers 7, 9        ^ advance() returns [7, 9]: from here the new one

Tensors keep their addresses, so captured steps stay valid. A lost peer raises PeerLost before any weight of the batch has changed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from eplb.pack import Layout
from eplb.plan import Moves, move_batches
from hw.moves import Exchange


@dataclass(frozen=True)
class _Move:
    """One expert on its way. Slots are numbered on their ranks."""

    layer: int
    source_rank: int
    source_slot: int
    target_rank: int
    target_slot: int


@dataclass(frozen=True)
class _Piece:
    move: _Move
    start: int  # bytes
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Migration:
    """One plan's moves on one rank."""

    def __init__(
        self, weights: Mapping[int, Sequence[torch.Tensor]], moves: Moves, layout: Layout, group: Exchange, *, buffer: torch.Tensor,
        slice_bytes: int,
    ):  # fmt: skip
        """weights: for each layer that has moves, this rank's `[slots_per_rank, ...]` tensors, contiguous, data and scales alike.

        group: all ranks of the layout. buffer: uint8, on the device of the weights, as large as those of one layer.
        """
        assert group.size == layout.num_ranks, f"group of {group.size} ranks, layout of {layout.num_ranks}"
        assert slice_bytes >= 1, slice_bytes
        self._group, self._slice_bytes, self._buffer = group, slice_bytes, buffer
        # [slots_per_rank, bytes] views
        self._weights = {
            layer: [tensor.view(layout.slots_per_rank, -1).view(torch.uint8) for tensor in tensors] for layer, tensors in weights.items()
        }
        self._batches = move_batches(moves, layout)
        self._moves: dict[int, list[_Move]] = {layer: [] for batch in self._batches for layer in batch}
        for layer, source, target in zip(moves.layer.tolist(), moves.source.tolist(), moves.target.tolist(), strict=True):
            self._moves[layer].append(_Move(layer, *divmod(source, layout.slots_per_rank), *divmod(target, layout.slots_per_rank)))
        self._rounds: list[list[_Piece]] = []
        self._arrived: dict[_Move, torch.Tensor] = {}  # [bytes] of each expert that comes to this rank

    @property
    def done(self) -> bool:
        return not self._batches

    def advance(self) -> list[int]:
        """Move one slice. Returns the layers that are complete now, none or several. Collective; raises PeerLost."""
        assert not self.done, "every layer has moved"
        if not self._rounds:
            self._begin([move for layer in self._batches[0] for move in self._moves[layer]])
        self._exchange(self._rounds.pop(0))
        if self._rounds:
            return []
        self._commit()
        return self._batches.pop(0)

    def _begin(self, moves: list[_Move]) -> None:
        self._rounds = _schedule(moves, {layer: self._expert_bytes(layer) for layer in self._weights}, self._slice_bytes)
        filled = 0
        for move in moves:
            if move.target_rank == self._group.rank:
                num_bytes = self._expert_bytes(move.layer)
                self._arrived[move] = self._buffer[filled : filled + num_bytes]
                filled += num_bytes
                if move.source_rank == self._group.rank:
                    self._arrived[move].copy_(self._read(_Piece(move, 0, num_bytes)))

    def _expert_bytes(self, layer: int) -> int:
        return sum(tensor.shape[1] for tensor in self._weights[layer])

    def _read(self, piece: _Piece) -> torch.Tensor:
        """Its bytes, from the tensors of the source slot one after the other."""
        found, begin = [], 0
        for tensor in self._weights[piece.move.layer]:
            found.append(tensor[piece.move.source_slot, max(piece.start - begin, 0) : max(piece.stop - begin, 0)])
            begin += tensor.shape[1]
        return torch.cat(found)

    def _exchange(self, pieces: list[_Piece]) -> None:
        rank = self._group.rank
        # Sorting keeps the order of the pieces between two ranks, which is the same on both.
        sent = sorted((piece for piece in pieces if piece.move.source_rank == rank), key=lambda piece: piece.move.target_rank)
        received = sorted((piece for piece in pieces if piece.move.target_rank == rank), key=lambda piece: piece.move.source_rank)
        send, receive = [0] * self._group.size, [0] * self._group.size
        for piece in sent:
            send[piece.move.target_rank] += piece.num_bytes
        for piece in received:
            receive[piece.move.source_rank] += piece.num_bytes
        got = self._group.all_to_all(torch.cat([self._buffer[:0], *map(self._read, sent)]), send, receive)
        for piece, part in zip(received, got.split([piece.num_bytes for piece in received]), strict=True):
            self._arrived[piece.move][piece.start : piece.stop].copy_(part)

    def _commit(self) -> None:
        for move, arrived in self._arrived.items():
            tensors = self._weights[move.layer]
            for tensor, part in zip(tensors, arrived.split([tensor.shape[1] for tensor in tensors]), strict=True):
                tensor[move.target_slot].copy_(part)
        self._arrived = {}


def _schedule(moves: list[_Move], expert_bytes: Mapping[int, int], slice_bytes: int) -> list[list[_Piece]]:
    """Rounds in each of which no rank sends or receives more than `slice_bytes`. At least one round, maybe without pieces."""
    rounds: list[list[_Piece]] = [[]]
    # Where a rank's next byte has room: bytes that it has sent (or received) plus those it had to let pass. Whole slices are rounds.
    sent: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for move in moves:
        if move.source_rank == move.target_rank:
            continue
        start = 0
        while start < expert_bytes[move.layer]:
            at = max(sent[move.source_rank], received[move.target_rank])
            number, used = divmod(at, slice_bytes)
            num_bytes = min(slice_bytes - used, expert_bytes[move.layer] - start)
            rounds.extend([] for _ in range(number + 1 - len(rounds)))
            rounds[number].append(_Piece(move, start, start + num_bytes))
            sent[move.source_rank] = received[move.target_rank] = at + num_bytes
            start += num_bytes
    return rounds
