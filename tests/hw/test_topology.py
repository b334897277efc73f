"""Coordinates of ranks."""

import itertools

import pytest

from hw.topology import ParallelConfig, RankPlace


def test_one_rank_by_default():
    config = ParallelConfig()
    assert config.num_ranks == config.ep == config.ranks_per_node == 1
    assert config.place(0) == RankPlace(rank=0, node=0, dp=0, tp=0, ep=0)


def test_places_by_hand():
    config = ParallelConfig(dp=4, tp=2, nodes=2)
    assert config.place(5) == RankPlace(rank=5, node=1, dp=2, tp=1, ep=5)
    assert config.tp_group(2) == [4, 5]


SIZES = [(dp, tp, nodes) for dp, tp, nodes in itertools.product((1, 2, 3, 8), (1, 2, 4), (1, 2, 3)) if dp * tp % nodes == 0]


@pytest.mark.parametrize(("dp", "tp", "nodes"), SIZES)
def test_every_rank_has_one_place(dp: int, tp: int, nodes: int):
    config = ParallelConfig(dp=dp, tp=tp, nodes=nodes)
    places = [config.place(rank) for rank in range(config.num_ranks)]
    assert [place.rank for place in places] == [place.ep for place in places] == list(range(dp * tp))
    assert len({(place.dp, place.tp) for place in places}) == dp * tp
    assert sorted(rank for group in range(dp) for rank in config.tp_group(group)) == list(range(dp * tp))
    for place in places:
        assert 0 <= place.dp < dp and 0 <= place.tp < tp and 0 <= place.node < nodes
        assert config.tp_group(place.dp)[place.tp] == place.rank
    per_node = [sum(place.node == node for place in places) for node in range(nodes)]
    assert per_node == [config.ranks_per_node] * nodes


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp": 0}, "dp must be at least 1, got 0"),
        ({"tp": -2}, "tp must be at least 1, got -2"),
        ({"nodes": 0}, "nodes must be at least 1, got 0"),
        ({"dp": 3, "tp": 1, "nodes": 2}, r"3 ranks \(dp 3 x tp 1\) do not divide over 2 nodes"),
    ],
)
def test_refusals(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**sizes)


@pytest.mark.parametrize("rank", [-1, 4])
def test_no_place_outside_the_instance(rank: int):
    with pytest.raises(AssertionError):
        ParallelConfig(dp=2, tp=2).place(rank)
