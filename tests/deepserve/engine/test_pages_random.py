"""Thousands of random operations on `Pages` against a model of it that is too simple to be wrong."""

import random
from array import array

import pytest

from deepserve.engine.pages import OutOfPages, Pages

SIZE = 4
Key = tuple  # (weight version, salt, all tokens up to the page's end): what a page's latents depend on


class Model:
    """Free pages as a set, published pages by the whole content they depend on, least recently used first in a list."""

    def __init__(self, num_pages: int):
        self.free = set(range(num_pages))
        self.users: dict[int, int] = {}
        self.page_of: dict[Key, int] = {}
        self.lru: list[int] = []

    def take(self, pages: list[int]) -> None:
        """The pages that an allocation returned are the ones it should have."""
        num_evicted = max(0, len(pages) - len(self.free))
        evicted, self.lru = self.lru[:num_evicted], self.lru[num_evicted:]
        self.page_of = {key: page for key, page in self.page_of.items() if page not in evicted}
        assert len(set(pages)) == len(pages) and set(evicted) <= set(pages) <= self.free | set(evicted)
        self.free -= set(pages)

    def hold(self, pages: list[int]) -> None:
        for page in pages:
            self.users[page] = self.users.get(page, 0) + 1
        self.lru = [page for page in self.lru if page not in pages]

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page]:
                del self.users[page]
                if page in self.page_of.values():
                    self.lru.append(page)
                else:
                    self.free.add(page)

    def match(self, version: int, salt: str, tokens: tuple) -> list[int]:
        found = []
        for end in range(SIZE, len(tokens), SIZE):
            page = self.page_of.get((version, salt, tokens[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def publish(self, key: Key, page: int) -> None:
        if key not in self.page_of and page not in self.page_of.values():
            self.page_of[key] = page

    def forget(self) -> None:
        self.free |= set(self.lru)
        self.lru, self.page_of = [], {}


class Sequence:
    """What a scheduler keeps of one."""

    def __init__(self, salt: str, tokens: list[int], version: int):
        self.salt, self.tokens, self.version = salt, array("i", tokens), version
        self.pages: list[int] = []
        self.hashes: list[bytes] = []


class Play:
    """Does one thing at a time to both."""

    def __init__(self, rng: random.Random, num_pages: int):
        self.rng = rng
        self.pages, self.model = Pages(num_pages, SIZE), Model(num_pages)
        self.live: list[Sequence] = []
        self.transfers: dict[str, tuple[str, list[int]]] = {}  # owner -> state, pages
        self.num_named = 0
        self.now_s = 0.0
        self.deadlines: dict[str, float] = {}  # of transfers that nobody gave up
        self.num_hits = self.num_refused = self.num_expired = 0

    def _token(self) -> int:
        return int(self.rng.random() < 0.1)

    def take(self, num: int) -> list[int] | None:
        """Allocate; None if the model has too few, and then the real thing must refuse."""
        if num <= len(self.model.free) + len(self.model.lru):
            pages = self.pages.allocate(num)
            self.model.take(pages)
            self.model.hold(pages)
            return pages
        with pytest.raises(OutOfPages):
            self.pages.allocate(num)
        self.num_refused += 1
        return None

    def start(self) -> None:
        # Few and unequal token values make shared prefixes likely.
        tokens = [self._token() for _ in range(self.rng.randrange(1, 24))]
        sequence = Sequence(self.rng.choice(["", "", "salt"]), tokens, self.pages.weight_version)
        hits, hashes = self.pages.match(sequence.tokens, sequence.salt)
        assert hits == self.model.match(self.pages.weight_version, sequence.salt, tuple(tokens))
        self.pages.hold(hits)
        self.model.hold(hits)
        self.num_hits += len(hits)
        sequence.pages, sequence.hashes = hits, hashes
        self.live.append(sequence)

    def compute(self) -> None:
        """A sequence gets pages for all its tokens and publishes the full ones."""
        if not self.live:
            return
        sequence = self.rng.choice(self.live)
        sequence.tokens.extend(self._token() for _ in range(self.rng.randrange(6)))
        missing = self.pages.num_for(len(sequence.tokens)) - len(sequence.pages)
        new = self.take(missing)
        if new is None:
            return
        sequence.pages = sequence.pages + new
        if sequence.version != self.pages.weight_version:
            return  # computed with other weights
        for page_idx in range(len(sequence.hashes), len(sequence.tokens) // SIZE):
            parent = sequence.hashes[-1] if sequence.hashes else self.pages.root_hash(sequence.salt)
            sequence.hashes.append(self.pages.publish(sequence.pages[page_idx], sequence.tokens, page_idx, parent))
            key = (sequence.version, sequence.salt, tuple(sequence.tokens[: (page_idx + 1) * SIZE]))
            self.model.publish(key, sequence.pages[page_idx])

    def leave(self) -> None:
        if self.live:
            sequence = self.live.pop(self.rng.randrange(len(self.live)))
            self.pages.release(sequence.pages)
            self.model.release(sequence.pages)

    def reserve(self) -> None:
        self.num_named += 1
        owner, num = f"t{self.num_named}", self.rng.randrange(1, 4)
        if num > len(self.model.free) + len(self.model.lru):
            with pytest.raises(OutOfPages):
                self.pages.reserve(owner, num, 0.0)
            return
        self.deadlines[owner] = self.now_s + self.rng.randrange(100, 600)
        pages = self.pages.reserve(owner, num, self.deadlines[owner])
        self.model.take(pages)
        self.transfers[owner] = ("reserved", pages)

    def renew(self) -> None:
        if self.deadlines:
            owner = self.rng.choice(list(self.deadlines))
            later_s = self.now_s + self.rng.randrange(300)
            self.pages.renew(owner, later_s)
            self.deadlines[owner] = max(self.deadlines[owner], later_s)

    def pass_time(self) -> None:
        """What is due is given up, and nothing else."""
        self.now_s += 1
        due = [owner for owner, deadline_s in self.deadlines.items() if deadline_s <= self.now_s]
        assert sorted(self.pages.expired(self.now_s)) == sorted(due)
        for owner in due:
            self.give_up(owner)
        self.num_expired += len(due)

    def give_up(self, owner: str) -> None:
        state, pages = self.transfers.pop(owner)
        del self.deadlines[owner]
        self.pages.cancel(owner)
        if state == "reserved":
            self.model.free |= set(pages)
        else:
            self.transfers[owner] = ("quarantined", pages)

    def advance_transfer(self) -> None:
        if not self.transfers:
            return
        owner = self.rng.choice(list(self.transfers))
        state, pages = self.transfers[owner]
        cancelled = self.rng.random() < 0.3
        if state == "quarantined":
            del self.transfers[owner]
            self.pages.acknowledge(owner)
            self.model.free |= set(pages)
        elif cancelled:
            self.give_up(owner)
        elif state == "reserved":
            self.pages.begin_transfer(owner)
            self.transfers[owner] = ("in_transfer", pages)
        else:
            del self.transfers[owner], self.deadlines[owner]
            assert self.pages.finish_transfer(owner) == pages
            self.model.hold(pages)
            sequence = Sequence("", [0] * (len(pages) * SIZE), -1)
            sequence.pages = pages
            self.live.append(sequence)

    def new_weights(self) -> None:
        self.pages.forget_cached()
        self.model.forget()
        self.pages.weight_version += 1

    def audit(self) -> None:
        self.pages.check([sequence.pages for sequence in self.live])
        found = {state.value: count for state, count in self.pages.states().items()}
        wanted = {"free": len(self.model.free), "cached": len(self.model.lru), "held": len(self.model.users)}
        for name in ("reserved", "in_transfer", "quarantined"):
            wanted[name] = sum(len(pages) for state, pages in self.transfers.values() if state == name)
        assert found == wanted
        assert self.pages.num_available == wanted["free"] + wanted["cached"]


@pytest.mark.parametrize("num_pages", [7, 24])
def test_random_operations(seed, num_pages):
    rng = random.Random(seed)
    play = Play(rng, num_pages)
    verbs = [play.start, play.compute, play.leave, play.reserve, play.advance_transfer, play.new_weights, play.renew]
    for _ in range(4000):
        rng.choices(verbs, weights=[30, 40, 32, 2, 1, 0.3, 0.3])[0]()
        play.pass_time()
        play.audit()
    assert play.num_hits > 100 and play.num_refused > 50 and play.num_expired > 3  # the walk went where it should
    while play.live:
        play.leave()
    while play.transfers:
        play.advance_transfer()
        play.audit()
    while play.live:
        play.leave()
    play.audit()
    assert play.pages.num_held == 0
