"""Bring experts to where a plan wants them, while serving: layer by layer, in slices between steps, in place.

Every rank makes the same `Migration` from the same plan and calls `advance()` at the same points, between two steps. A call moves one
slice. What arrives waits in a buffer, so steps go on with the old weights and the old placement; once all of a layer has arrived on every
rank, the call copies it into the slots and returns the layer, and from then on its new placement holds:

    slices    |1|2|3|      |1|2|                  a rank sends and receives at most `slice_bytes` in a slice
    steps   ..|  |  |  |...                       old placement
    layer 7         ^ advance() returns 7: from here the new one

Tensors keep their addresses, so captured steps stay valid. A lost peer raises PeerLost before any weight of the layer has changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eplb.pack import Layout
from eplb.plan import Moves
from hw.groups import Group


@dataclass(frozen=True)
class _Piece:
    """Bytes `start .. stop` of one expert on their way; `place` is where they wait among what comes to the target rank."""

    source_rank: int
    target_rank: int
    source_slot: int  # on its rank
    place: int
    start: int
    stop: int


class Migration:
    """One plan's moves on one rank."""

    def __init__(self, weights: Mapping[int, Sequence[torch.Tensor]], moves: Moves, layout: Layout, group: Group, *, slice_bytes: int):
        """weights: for each layer that has moves, this rank's `[slots_per_rank, ...]` tensors, contiguous, data and scales alike.

        group: all ranks of the layout. Needs room for what comes to this rank in one layer.
        """
        assert group.size == layout.num_ranks, f"group of {group.size} ranks, layout of {layout.num_ranks}"
        assert slice_bytes >= 1, slice_bytes
        self._layout, self._group, self._slice_bytes = layout, group, slice_bytes
        self._moves, self._weights = moves, weights
        self._layers = [int(layer) for layer in np.unique(moves.layer)]
        self._rounds: list[list[_Piece]] = []
        self._arrived = torch.empty(0)

    @property
    def done(self) -> bool:
        return not self._layers

    def advance(self) -> int | None:
        """Move one slice. Returns the layer that is complete now, else None. Collective; raises PeerLost."""
        assert not self.done, "every layer has moved"
        layer = self._layers[0]
        if not self._rounds:
            self._begin(layer)
        self._exchange(layer, self._rounds.pop(0))
        if self._rounds:
            return None
        self._commit(layer)
        self._layers.pop(0)
        return layer

    def _tensors(self, layer: int) -> list[torch.Tensor]:
        """`[slots_per_rank, bytes]` views."""
        return [tensor.view(self._layout.slots_per_rank, -1).view(torch.uint8) for tensor in self._weights[layer]]

    def _incoming(self, layer: int) -> list[tuple[int, int]]:
        """(source, target) slots of the moves to this rank, in order of arrival places."""
        chosen = self._moves.layer == layer
        pairs = zip(self._moves.source[chosen].tolist(), self._moves.target[chosen].tolist(), strict=True)
        return [(source, target) for source, target in pairs if target // self._layout.slots_per_rank == self._group.rank]

    def _begin(self, layer: int) -> None:
        tensors, slots = self._tensors(layer), self._layout.slots_per_rank
        chosen = self._moves.layer == layer
        expert_bytes = sum(tensor.shape[1] for tensor in tensors)
        self._rounds = _schedule(self._moves.source[chosen], self._moves.target[chosen], slots, expert_bytes, self._slice_bytes)
        incoming = self._incoming(layer)
        self._arrived = torch.empty((len(incoming), expert_bytes), dtype=torch.uint8, device=tensors[0].device)
        for place, (source, _) in enumerate(incoming):
            if source // slots == self._group.rank:  # before anyone writes to it
                torch.cat([tensor[source % slots] for tensor in tensors], out=self._arrived[place])

    def _exchange(self, layer: int, pieces: list[_Piece]) -> None:
        tensors, rank = self._tensors(layer), self._group.rank
        send, receive = [0] * self._group.size, [0] * self._group.size
        sent, target = self._arrived.new_empty(0), None
        for piece in pieces:
            if piece.source_rank == rank:
                sent = _read([tensor[piece.source_slot] for tensor in tensors], piece.start, piece.stop)
                send[piece.target_rank] = len(sent)
            if piece.target_rank == rank:
                target = self._arrived[piece.place, piece.start : piece.stop]
                receive[piece.source_rank] = len(target)
        got = self._group.all_to_all(sent, send, receive)
        if target is not None:
            target.copy_(got)

    def _commit(self, layer: int) -> None:
        tensors, slots = self._tensors(layer), self._layout.slots_per_rank
        for arrived, (_, target) in zip(self._arrived, self._incoming(layer), strict=True):
            for tensor, part in zip(tensors, arrived.split([tensor.shape[1] for tensor in tensors]), strict=True):
                tensor[target % slots].copy_(part)
        self._arrived = torch.empty(0)


def _schedule(source: np.ndarray, target: np.ndarray, slots_per_rank: int, expert_bytes: int, slice_bytes: int) -> list[list[_Piece]]:
    """Rounds in each of which a rank sends at most one piece and receives at most one. At least one round, maybe without pieces."""
    rounds: list[list[_Piece]] = [[]]
    free_to_send: dict[int, int] = {}
    free_to_receive: dict[int, int] = {}
    places: dict[int, int] = {}
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        (giver, slot), taker = divmod(one, slots_per_rank), other // slots_per_rank
        place = places[taker] = places.get(taker, -1) + 1
        if giver == taker:
            continue
        for start in range(0, expert_bytes, slice_bytes):
            at = max(free_to_send.get(giver, 0), free_to_receive.get(taker, 0))
            free_to_send[giver] = free_to_receive[taker] = at + 1
            rounds.extend([] for _ in range(at + 1 - len(rounds)))
            rounds[at].append(_Piece(giver, taker, slot, place, start, min(start + slice_bytes, expert_bytes)))
    return rounds


def _read(parts: list[torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Bytes `start .. stop` of the parts one after the other."""
    found, begin = [], 0
    for part in parts:
        found.append(part[max(start - begin, 0) : max(stop - begin, 0)])
        begin += len(part)
    return torch.cat(found)
