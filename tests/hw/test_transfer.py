"""The counting of a hand-off's parts, without any library."""

import random

import pytest

from hw.transfer import Part, Receipt, layer_share


@pytest.mark.parametrize("num_regions", [0, 1, 5, 27, 61, 62])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_layer_shares_cover_every_region_once(num_regions, size):
    shares = [layer_share(num_regions, rank, size) for rank in range(size)]
    assert [region for share in shares for region in share] == list(range(num_regions))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def parts_of(num_parts: list[int], epoch: int = 1, transfer: str = "t") -> list[Part]:
    return [Part(transfer, epoch, writer, idx, idx == num - 1) for writer, num in enumerate(num_parts) for idx in range(num)]


def test_a_receipt_is_complete_with_the_last_missing_part_and_no_sooner(seed):
    rng = random.Random(seed)
    for _ in range(300):
        num_parts = [rng.randrange(1, 5) for _ in range(rng.randrange(1, 5))]
        parts = parts_of(num_parts)
        late = [Part("t", 0, 0, 0, True), Part("other", 1, 0, 0, True), Part("t", 1, len(num_parts), 0, True), Part("t", 1, -1, 0, True)]
        stream = parts + rng.choices(parts, k=3) + late
        rng.shuffle(stream)
        receipt, missing = Receipt("t", 1, len(num_parts)), set(parts)
        for part in stream:
            assert not receipt.complete or not missing
            assert receipt.add(part) is (part in parts)
            missing.discard(part)
            assert receipt.complete is (not missing)


def test_parts_of_an_older_attempt_do_not_help_a_newer_one():
    receipt = Receipt("t", 2, num_writers=2)
    for part in parts_of([3, 3], epoch=1):
        assert not receipt.add(part)
    first, *others = parts_of([3, 3], epoch=2)
    assert all(receipt.add(part) for part in others)
    assert not receipt.complete
    assert receipt.add(first)
    assert receipt.complete
