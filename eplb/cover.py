"""A placement for ranks that came together anew: what they hold stays where it is, what none of them holds gets a slot. Pure.

Balance is not looked at: moves do that afterwards, while the instance serves.
"""

from collections import Counter
from collections.abc import Sequence


def cover(held: Sequence[Sequence[int]], num_logical: int, slots_per_rank: int) -> list[list[int]]:
    """The logical expert of each slot of each rank, `[ranks][slots_per_rank]`, from the experts that the ranks hold in one layer.

    A rank with too many slots gives up what others hold as well, first; one with too few repeats what it holds. The number of slots may
    be another one than before; if it is not, an expert that stays keeps its slot. Every rank holds something. ValueError: not enough slots.
    """
    if len(held) * slots_per_rank < num_logical:
        raise ValueError(f"{len(held)} ranks with {slots_per_rank} slots each cannot hold {num_logical} experts")
    rows: list[list[int | None]] = [list(row) for row in held]
    copies = Counter(expert for row in held for expert in row)
    for row in rows:
        while len(row) > slots_per_rank:
            copies[row.pop(max(range(len(row)), key=lambda slot, row=row: copies[row[slot]]))] -= 1
        row += [None] * (slots_per_rank - len(row))
    taken = Counter()  # of slots, by rank
    for expert in range(num_logical):
        if not copies[expert]:
            rank, slot = _room(rows, copies, taken)
            taken[rank] += 1
            if (evicted := rows[rank][slot]) is not None:
                copies[evicted] -= 1
            rows[rank][slot] = expert
            copies[expert] = 1
    for row in rows:
        own = [expert for expert in row if expert is not None]
        for slot, expert in enumerate(row):
            if expert is None:
                row[slot] = min(own, key=copies.__getitem__)
                copies[row[slot]] += 1
    return [[expert for expert in row if expert is not None] for row in rows]


def _room(rows: list[list[int | None]], copies: Counter, taken: Counter) -> tuple[int, int]:
    """Where an expert goes that nobody holds: an empty slot of the rank that has most of them, else the slot of what has most copies,
    on the rank that took least.
    """
    rank = max(range(len(rows)), key=lambda rank: rows[rank].count(None))
    if None in rows[rank]:
        return rank, rows[rank].index(None)
    slots = ((rank, slot) for rank, row in enumerate(rows) for slot in range(len(row)))
    return max(slots, key=lambda at: (copies[rows[at[0]][at[1]]], -taken[at[0]]))
