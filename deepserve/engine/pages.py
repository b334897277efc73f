"""Page allocator and prefix cache: who owns each page of the latent cache. No torch; layouts are none of its business.

Every page is in exactly one state:

    FREE ---allocate---> HELD ---release, published---> CACHED ---evict or hit---> (FREE) / HELD
      |                    \\---release, unpublished---> FREE
      '--reserve--> RESERVED --begin_transfer--> IN_TRANSFER --finish_transfer--> HELD
                        |                            '---cancel---> QUARANTINED --acknowledge--> FREE
                        '---cancel---> FREE

CACHED pages belong to nobody and can be taken back at any time, least recently used first. RESERVED and below are the hand-off
of a prefill instance: a remote writer may still touch an IN_TRANSFER page, so a cancelled one is QUARANTINED until the writer
acknowledges or is shut out (`deepserve.pd.fence`); no time is long enough.

The prefix cache is a chain of SHA-256 over (parent hash, tokens of a page); the root holds the tagged extras that make equal tokens mean
different latents (cache salt, weight version). On a hit the tokens themselves are compared too.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256


class PageState(Enum):
    """See the drawing above."""

    FREE = "free"
    HELD = "held"
    CACHED = "cached"
    RESERVED = "reserved"
    IN_TRANSFER = "in_transfer"
    QUARANTINED = "quarantined"


LIVE = (PageState.RESERVED, PageState.IN_TRANSFER)  # hand-offs that may still succeed


class OutOfPages(Exception):
    """Fewer pages are free or cached than were asked for."""


@dataclass
class Transfer:
    """Pages that a remote writer fills. `deadline_s` ends their lease, on the caller's clock; the holder ends it then by `cancel`."""

    pages: list[int]
    state: PageState
    deadline_s: float


class Pages:
    """All pages of one rank's cache. `page_size` is in tokens; sizes are in pages unless named otherwise."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_caching: bool = True, weight_version: int = 0):
        self.num_pages, self.page_size, self.prefix_caching = num_pages, page_size, prefix_caching
        self.weight_version = weight_version
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: recently used memory is warm
        self._num_users = [0] * num_pages  # sequences that hold the page
        self._cached: OrderedDict[int, None] = OrderedDict()  # published pages without users, least recently used first
        self._published: dict[bytes, tuple[int, bytes]] = {}  # hash -> page, its tokens
        self._hash_of: dict[int, bytes] = {}  # inverse of _published
        self._transfers: dict[str, Transfer] = {}
        self._written: dict[int, int] = {}  # pages that a step in flight may still write to for who gave them up -> the latest such step

    # Allocation

    @property
    def num_available(self) -> int:
        """Pages that an allocation can get."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages in use by sequences or transfers."""
        return self.num_pages - self.num_available

    def num_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num: int) -> list[int]:
        """Take `num` pages, evicting cached ones. Raises OutOfPages and takes none if there are too few."""
        taken = self._take(num)
        for page in taken:
            self._num_users[page] = 1
        return taken

    def _take(self, num: int) -> list[int]:
        if num > self.num_available:
            raise OutOfPages(f"{num} pages wanted, {self.num_available} available")
        while len(self._free) < num:
            page, _ = self._cached.popitem(last=False)
            del self._published[self._hash_of.pop(page)]
            self._free.append(page)
        taken = self._free[len(self._free) - num :]
        del self._free[len(self._free) - num :]
        taken.reverse()
        return taken

    def release(self, pages: list[int], step: int | None = None) -> None:
        """Give up a sequence's pages, in its order. The tail is evicted first: a prefix is useful without its tail, not the reverse.

        step: the latest in flight with the sequence in it. Later steps write after it, so they may have the pages; see `may_be_written`.
        """
        if step is not None:
            self._written |= dict.fromkeys(pages, step)
        for page in reversed(pages):
            assert self._num_users[page] > 0, f"page {page} is not held"
            self._num_users[page] -= 1
            if self._num_users[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def may_be_written(self, pages: list[int]) -> bool:
        """Whether a step in flight may still write to some of these: then nobody else may, who does not wait for the device."""
        return not self._written.keys().isdisjoint(pages)

    def end_writes(self, step: int) -> None:
        """Steps up to this one are no longer in flight."""
        if self._written:
            self._written = {page: last for page, last in self._written.items() if last > step}

    # Prefix cache

    def root_hash(self, cache_salt: str) -> bytes:
        """Parent of a sequence's first page."""
        return sha256(f"weights={self.weight_version};salt={len(cache_salt)}:{cache_salt}".encode()).digest()

    def match(self, tokens: array, cache_salt: str) -> tuple[list[int], list[bytes]]:
        """Longest published prefix of whole pages, leaving at least one token to compute: pages and their hashes. Takes nothing."""
        pages: list[int] = []
        hashes: list[bytes] = []
        if not self.prefix_caching:
            return pages, hashes
        page_bytes = self.page_size * tokens.itemsize
        view = memoryview(tokens).cast("B")
        parent = self.root_hash(cache_salt)
        published = self._published
        for low in range(0, (len(tokens) - 1) // self.page_size * page_bytes, page_bytes):
            chunk = view[low : low + page_bytes]
            parent = sha256(parent + chunk).digest()
            found = published.get(parent)
            if found is None or found[1] != chunk:
                break
            pages.append(found[0])
            hashes.append(parent)
        return pages, hashes

    def num_cached_of(self, pages: Iterable[int]) -> int:
        """How many of these pages are CACHED now, so that holding them lowers `num_available`."""
        return sum(page in self._cached for page in pages)

    def hold(self, pages: list[int]) -> None:
        """Add a user to published pages that `match` found."""
        for page in pages:
            if self._num_users[page] == 0:
                del self._cached[page]
            self._num_users[page] += 1

    def publish(self, page: int, tokens: array, page_idx: int, parent: bytes) -> bytes:
        """Offer a held page whose latents are all computed: page `page_idx` of a sequence with these tokens. Returns its hash.

        A page whose content is published already stays private.
        """
        assert self._num_users[page] > 0, f"page {page} is not held"
        content = tokens[page_idx * self.page_size : (page_idx + 1) * self.page_size].tobytes()
        digest = sha256(parent + content).digest()
        if self.prefix_caching and digest not in self._published and page not in self._hash_of:
            self._published[digest] = (page, content)
            self._hash_of[page] = digest
        return digest

    def forget_cached(self) -> None:
        """Empty the prefix cache; pages in use stay in use and are no longer found. For new weights."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._published.clear()
        self._hash_of.clear()

    # Transfers: pages that a remote instance writes

    def reserve(self, owner: str, num: int, deadline_s: float) -> list[int]:
        """Set pages aside for a hand-off that `owner` names. Raises OutOfPages."""
        assert owner not in self._transfers, f"transfer {owner!r} exists"
        pages = self._take(num)
        self._transfers[owner] = Transfer(pages, PageState.RESERVED, deadline_s)
        return pages

    def begin_transfer(self, owner: str) -> None:
        """The remote side may write from now on."""
        transfer = self._transfers[owner]
        assert transfer.state is PageState.RESERVED, (owner, transfer.state)
        transfer.state = PageState.IN_TRANSFER

    def renew(self, owner: str, deadline_s: float) -> None:
        """Move the lease of a hand-off that makes progress to a later time; an earlier one changes nothing."""
        transfer = self._transfers[owner]
        assert transfer.state in LIVE, (owner, transfer.state)
        transfer.deadline_s = max(transfer.deadline_s, deadline_s)

    def finish_transfer(self, owner: str) -> list[int]:
        """All is written: the pages are HELD by one sequence."""
        transfer = self._leave(owner, PageState.IN_TRANSFER)
        for page in transfer.pages:
            self._num_users[page] = 1
        return transfer.pages

    def cancel(self, owner: str) -> None:
        """Give up a hand-off. Pages that may still be written to are quarantined."""
        transfer = self._transfers[owner]
        if transfer.state is PageState.RESERVED:
            self._free.extend(self._transfers.pop(owner).pages)
        else:
            transfer.state = PageState.QUARANTINED

    def acknowledge(self, owner: str) -> None:
        """The writer of a cancelled hand-off has nothing of it under way any more, or is shut out."""
        self._free.extend(self._leave(owner, PageState.QUARANTINED).pages)

    def _leave(self, owner: str, state: PageState) -> Transfer:
        """End a hand-off that is in `state`; in another state it stays as it is."""
        transfer = self._transfers[owner]
        assert transfer.state is state, (owner, transfer.state)
        return self._transfers.pop(owner)

    def expired(self, now_s: float) -> list[str]:
        """Owners of hand-offs past their deadline that nobody cancelled yet."""
        return [owner for owner, transfer in self._transfers.items() if transfer.deadline_s <= now_s and transfer.state in LIVE]

    def num_transferred(self, *states: PageState) -> int:
        """Pages of hand-offs in these states."""
        return sum(len(transfer.pages) for transfer in self._transfers.values() if transfer.state in states)

    # Audit

    def states(self) -> dict[PageState, int]:
        """Pages in each state."""
        counts = dict.fromkeys(PageState, 0)
        counts[PageState.FREE] = len(self._free)
        counts[PageState.CACHED] = len(self._cached)
        counts[PageState.HELD] = sum(users > 0 for users in self._num_users)
        for transfer in self._transfers.values():
            counts[transfer.state] += len(transfer.pages)
        return counts

    def check(self, holders: Iterable[list[int]] | None = None) -> None:
        """Every page is in exactly one state, and users are who they should be. AssertionError says what is wrong.

        holders: the page lists of all live sequences, if the caller knows them.
        """
        in_transfer = [page for transfer in self._transfers.values() for page in transfer.pages]
        held = [page for page, users in enumerate(self._num_users) if users]
        places = self._free + list(self._cached) + held + in_transfer
        assert sorted(places) == list(range(self.num_pages)), f"pages counted twice or lost: {self.states()} of {self.num_pages}"
        assert len(self._published) == len(self._hash_of), "a page is published twice, or lost from one of the tables"
        assert {page: digest for digest, (page, _) in self._published.items()} == self._hash_of, "published pages and hashes differ"
        assert all(page in self._hash_of for page in self._cached), "a cached page is not published"
        assert not any(page in self._hash_of for page in self._free + in_transfer), "a free page is still published"
        if holders is not None:
            users = [0] * self.num_pages
            for pages in holders:
                for page in pages:
                    users[page] += 1
            wrong = [page for page in range(self.num_pages) if users[page] != self._num_users[page]]
            assert not wrong, f"pages {wrong[:8]} have other users than the sequences that list them"
