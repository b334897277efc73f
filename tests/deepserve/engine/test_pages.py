"""Every state of a page and every way between them; the prefix cache; the audit."""

from array import array
from collections.abc import Callable

import pytest

from deepserve.engine.pages import OutOfPages, Pages, PageState

SIZE = 4


def tokens_of(*values: int) -> array:
    return array("i", values)


def states(pages: Pages) -> dict[str, int]:
    pages.check()
    return {state.value: count for state, count in pages.states().items() if count}


def publish_all(pages: Pages, held: list[int], tokens: array, salt: str = "") -> list[bytes]:
    """Publish every full page of a sequence."""
    hashes: list[bytes] = []
    for page_idx in range(len(tokens) // SIZE):
        parent = hashes[-1] if hashes else pages.root_hash(salt)
        hashes.append(pages.publish(held[page_idx], tokens, page_idx, parent))
    return hashes


def make_cached(pages: Pages, tokens: array, salt: str = "") -> list[int]:
    """A sequence comes, computes, publishes and goes."""
    held = pages.allocate(pages.num_for(len(tokens)))
    publish_all(pages, held, tokens, salt)
    pages.release(held)
    return held


# States


def test_unpublished_pages_go_back_to_free():
    pages = Pages(4, SIZE)
    held = pages.allocate(3)
    assert len(set(held)) == 3
    assert states(pages) == {"held": 3, "free": 1}
    assert (pages.num_held, pages.num_available, pages.num_cached) == (3, 1, 0)
    pages.release(held)
    assert states(pages) == {"free": 4}


def test_published_pages_are_cached_then_hit():
    pages = Pages(4, SIZE)
    held = pages.allocate(2)
    tokens = array("i", range(9))
    publish_all(pages, held, tokens)
    assert states(pages) == {"held": 2, "free": 2}
    pages.release(held)
    assert states(pages) == {"cached": 2, "free": 2}
    hits, hashes = pages.match(tokens, "")
    assert hits == held and len(hashes) == 2
    assert states(pages) == {"cached": 2, "free": 2}  # a match takes nothing
    assert pages.num_cached_of(hits) == 2
    pages.hold(hits)
    assert states(pages) == {"held": 2, "free": 2}
    assert pages.num_cached_of(hits) == 0


def test_cached_pages_are_evicted_when_free_ones_run_out():
    pages = Pages(3, SIZE)
    tokens = array("i", range(9))
    make_cached(pages, tokens[:8])
    assert states(pages) == {"cached": 2, "free": 1}
    pages.allocate(1)
    assert states(pages) == {"cached": 2, "held": 1}  # free pages go first
    pages.allocate(2)
    assert states(pages) == {"held": 3}
    assert pages.match(tokens, "") == ([], [])


def test_a_transfer_that_succeeds():
    pages = Pages(4, SIZE)
    reserved = pages.reserve("a", 2, deadline_s=10.0)
    assert states(pages) == {"reserved": 2, "free": 2}
    pages.begin_transfer("a")
    assert states(pages) == {"in_transfer": 2, "free": 2}
    assert pages.num_held == 2
    assert pages.finish_transfer("a") == reserved
    assert states(pages) == {"held": 2, "free": 2}
    pages.check([reserved])
    pages.release(reserved)
    assert states(pages) == {"free": 4}


def test_a_cancelled_reservation_is_free_at_once():
    pages = Pages(4, SIZE)
    pages.reserve("a", 2, deadline_s=10.0)
    pages.cancel("a")
    assert states(pages) == {"free": 4}
    pages.reserve("a", 4, deadline_s=10.0)  # the name is free too
    assert states(pages) == {"reserved": 4}


def test_a_cancelled_transfer_waits_for_its_writer():
    pages = Pages(4, SIZE)
    pages.reserve("a", 3, deadline_s=10.0)
    pages.begin_transfer("a")
    pages.cancel("a")
    pages.cancel("a")  # twice is once
    assert states(pages) == {"quarantined": 3, "free": 1}
    with pytest.raises(OutOfPages):
        pages.allocate(2)
    pages.acknowledge("a")
    assert states(pages) == {"free": 4}


def test_transfers_refuse_what_the_drawing_does_not_show():
    pages = Pages(4, SIZE)
    pages.reserve("a", 1, deadline_s=1.0)
    for forbidden in (pages.finish_transfer, pages.acknowledge, lambda owner: pages.reserve(owner, 1, 1.0)):
        with pytest.raises(AssertionError):
            forbidden("a")
        assert states(pages) == {"reserved": 1, "free": 3}
    pages.begin_transfer("a")
    for forbidden in (pages.begin_transfer, pages.acknowledge):
        with pytest.raises(AssertionError):
            forbidden("a")
        assert states(pages) == {"in_transfer": 1, "free": 3}
    pages.cancel("a")
    for forbidden in (pages.begin_transfer, pages.finish_transfer):
        with pytest.raises(AssertionError):
            forbidden("a")
        assert states(pages) == {"quarantined": 1, "free": 3}  # a late finish does not lose the pages
    with pytest.raises(AssertionError):
        pages.release([0, 1, 2, 3])


def test_reservations_evict_and_expire():
    pages = Pages(3, SIZE)
    make_cached(pages, array("i", range(12)))
    pages.reserve("early", 2, deadline_s=5.0)
    pages.reserve("late", 1, deadline_s=9.0)
    assert states(pages) == {"reserved": 3}
    pages.begin_transfer("late")
    assert pages.expired(4.9) == []
    assert pages.expired(5.0) == ["early"]
    assert pages.expired(20.0) == ["early", "late"]
    for owner in pages.expired(20.0):
        pages.cancel(owner)
    assert pages.expired(20.0) == []
    assert states(pages) == {"free": 2, "quarantined": 1}


def test_progress_renews_a_lease():
    pages = Pages(3, SIZE)
    pages.reserve("a", 2, deadline_s=5.0)
    pages.renew("a", 8.0)
    pages.begin_transfer("a")
    pages.renew("a", 6.0)  # no earlier than promised
    assert pages.expired(7.9) == []
    assert pages.expired(8.0) == ["a"]
    pages.cancel("a")
    with pytest.raises(AssertionError):
        pages.renew("a", 20.0)  # what is given up stays so
    assert states(pages) == {"quarantined": 2, "free": 1}


def test_out_of_pages_takes_nothing():
    pages = Pages(4, SIZE)
    tokens = array("i", range(9))
    make_cached(pages, tokens[:8])
    held = pages.allocate(1)
    before = states(pages)
    for ask in (lambda: pages.allocate(4), lambda: pages.reserve("a", 4, deadline_s=1.0)):
        with pytest.raises(OutOfPages, match="4 pages wanted, 3 available"):
            ask()
        assert states(pages) == before
    assert len(pages.match(tokens, "")[0]) == 2  # nothing was evicted for it
    pages.check([held])
    pages.reserve("a", 3, deadline_s=1.0)  # and the name was not taken


# Prefix cache


def test_the_least_recently_released_goes_first_and_tails_before_heads():
    pages = Pages(6, SIZE)
    old, new = array("i", range(12)), array("i", range(100, 112))
    make_cached(pages, old)
    make_cached(pages, new)
    probe = tokens_of(0)

    def cached_lens() -> tuple[int, int]:
        return len(pages.match(old + probe, "")[0]), len(pages.match(new + probe, "")[0])

    seen = [cached_lens()]
    for _ in range(6):
        pages.allocate(1)
        seen.append(cached_lens())
    assert seen == [(3, 3), (2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_hit_makes_pages_recent():
    pages = Pages(4, SIZE)
    old, new = array("i", range(8)), array("i", range(100, 108))
    make_cached(pages, old)
    make_cached(pages, new)
    hits, _ = pages.match(old + tokens_of(0), "")
    pages.hold(hits)
    pages.release(hits)
    pages.allocate(2)
    assert len(pages.match(old + tokens_of(0), "")[0]) == 2
    assert pages.match(new + tokens_of(0), "") == ([], [])


def test_a_shared_prefix_is_found_up_to_the_first_difference():
    pages = Pages(8, SIZE)
    first = array("i", range(12))
    held = make_cached(pages, first)
    second = array("i", [*range(8), 99, 9, 10, 11, 12])
    assert pages.match(second, "")[0] == held[:2]
    assert pages.match(array("i", [99, *range(1, 12)]), "")[0] == []
    # Same tokens of the second page behind another first page: another content.
    assert pages.match(array("i", [9, 9, 9, 9, *range(4, 12)]), "")[0] == []


def test_a_match_leaves_one_token_to_compute():
    pages = Pages(8, SIZE)
    tokens = array("i", range(8))
    held = make_cached(pages, tokens)
    assert pages.match(tokens, "")[0] == held[:1]
    assert pages.match(tokens + tokens_of(8), "")[0] == held
    assert pages.match(tokens[:4], "")[0] == []
    assert pages.match(tokens[:1], "")[0] == []


def test_references_are_counted():
    pages = Pages(4, SIZE)
    tokens = array("i", range(9))
    first = pages.allocate(3)
    publish_all(pages, first, tokens)
    hits, _ = pages.match(tokens, "")
    pages.hold(hits)
    second = hits + pages.allocate(1)
    pages.check([first, second])
    pages.release(first)
    assert states(pages) == {"held": 3, "free": 1}
    pages.check([second])
    pages.release(second)
    assert states(pages) == {"cached": 2, "free": 2}
    with pytest.raises(AssertionError, match="not held"):
        pages.release(second)


def test_equal_content_is_published_once():
    pages = Pages(4, SIZE)
    tokens = array("i", range(5))
    first, second = pages.allocate(1), pages.allocate(1)
    assert publish_all(pages, first, tokens) == publish_all(pages, second, tokens)
    pages.release(second)
    assert states(pages) == {"held": 1, "free": 3}
    assert pages.match(tokens, "")[0] == first
    with pytest.raises(AssertionError, match="not held"):
        pages.publish(second[0], tokens, 0, pages.root_hash(""))


def test_a_page_is_published_once():
    pages = Pages(4, SIZE)
    tokens = array("i", range(5))
    held = pages.allocate(1)
    publish_all(pages, held, tokens, salt="a")
    publish_all(pages, held, tokens, salt="b")
    pages.check([held])
    assert pages.match(tokens, "a")[0] == held
    assert pages.match(tokens, "b")[0] == []


def test_salts_and_weight_versions_are_chains_of_their_own():
    tokens = array("i", range(9))
    pages = Pages(8, SIZE)
    held = make_cached(pages, tokens, salt="a")
    assert pages.match(tokens, "a")[0] == held[:2]
    assert pages.match(tokens, "") == pages.match(tokens, "b") == ([], [])
    pages.weight_version = 1
    assert pages.match(tokens, "a") == ([], [])
    pages.weight_version = 0
    assert pages.match(tokens, "a")[0] == held[:2]
    roots = {pages.root_hash(salt) for salt in ("", "a", "1:a", ";salt=1:a", "0")}
    assert len(roots) == 5


def test_tokens_are_compared_when_hashes_collide():
    pages = Pages(8, SIZE)
    tokens = array("i", range(13))
    held = make_cached(pages, tokens)
    _, hashes = pages.match(tokens, "")
    # As if other tokens had hashed to the same value as the second page.
    page, content = pages._published[hashes[1]]
    pages._published[hashes[1]] = (page, array("i", [4, 5, 6, 0]).tobytes())
    assert pages.match(tokens, "")[0] == held[:1]
    pages._published[hashes[1]] = (page, content)
    assert pages.match(tokens, "")[0] == held[:3]


def test_without_prefix_caching_nothing_is_published():
    pages = Pages(4, SIZE, prefix_caching=False)
    tokens = array("i", range(9))
    make_cached(pages, tokens)
    assert states(pages) == {"free": 4}
    assert pages.match(tokens, "") == ([], [])


def test_forget_cached():
    pages = Pages(6, SIZE)
    tokens, other = array("i", range(9)), array("i", range(50, 58))
    held = pages.allocate(3)
    publish_all(pages, held, tokens)
    make_cached(pages, other)
    assert states(pages) == {"held": 3, "cached": 2, "free": 1}
    pages.forget_cached()
    assert states(pages) == {"held": 3, "free": 3}
    pages.check([held])
    assert pages.match(tokens, "") == ([], [])
    pages.release(held)
    assert states(pages) == {"free": 6}  # what was in use is not found again either


@pytest.mark.parametrize(("num_tokens", "num"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_num_for(num_tokens, num):
    assert Pages(1, SIZE).num_for(num_tokens) == num


# The audit finds each kind of error


def _plant_second_digest(pages: Pages) -> None:
    digest = next(iter(pages._published))
    # In front, so that a dict of pages built from this one holds the right hash in the end.
    pages._published = {b"another": pages._published[digest], **pages._published}


PLANTED: dict[str, Callable[[Pages], object]] = {
    "a page lost from the free list": lambda pages: pages._free.pop(),
    "a page free twice": lambda pages: pages._free.append(pages._free[0]),
    "a held page also free": lambda pages: pages._free.append(next(page for page in range(8) if pages._num_users[page])),
    "a cached page also held": lambda pages: pages._num_users.__setitem__(next(iter(pages._cached)), 1),
    "a held page lost": lambda pages: pages._num_users.__setitem__(next(page for page in range(8) if pages._num_users[page]), 0),
    "a page in transfer lost": lambda pages: pages._transfers["t"].pages.pop(),
    "a page in transfer also free": lambda pages: pages._free.append(pages._transfers["t"].pages[0]),
    "a page that does not exist": lambda pages: pages._free.append(8),
    "a cached page without a hash": lambda pages: pages._published.pop(pages._hash_of.pop(next(iter(pages._cached)))),
    "a hash without its page": lambda pages: pages._hash_of.popitem(),
    "a page without its hash": lambda pages: pages._published.popitem(),
    "two hashes of one page": _plant_second_digest,
    "a free page still published": lambda pages: pages._free.append(pages._cached.popitem()[0]),
    "a user too many": lambda pages: pages._num_users.__setitem__(next(page for page in range(8) if pages._num_users[page]), 2),
}


@pytest.mark.parametrize("error", PLANTED)
def test_check_finds(error):
    pages = Pages(8, SIZE)
    make_cached(pages, array("i", range(8)))
    pages.reserve("t", 2, deadline_s=1.0)
    held = pages.allocate(2)
    pages.check([held])
    assert states(pages) == {"cached": 2, "reserved": 2, "held": 2, "free": 2}
    PLANTED[error](pages)
    with pytest.raises(AssertionError):
        pages.check([held])


def test_check_compares_holders():
    pages = Pages(4, SIZE)
    held = pages.allocate(2)
    pages.check()
    for wrong in ([], [held[:1]], [held, held[:1]]):
        with pytest.raises(AssertionError, match="other users"):
            pages.check(wrong)


def test_states_cover_the_drawing():
    assert set(Pages(2, SIZE).states()) == set(PageState)
