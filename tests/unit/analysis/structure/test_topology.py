"""Who exchanges with whom: every pattern from its edges, in any order of hosts, and what one host alone can tell."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.analysis.structure.structure import volume_of
from ringtap.analysis.structure.topology import shape_of

pytestmark = [pytest.mark.computes, pytest.mark.together]

NAMES = [f"h{number}" for number in range(8)]


def ring(order: list[str], volume: float = 100.0) -> dict[tuple[str, str], float]:
    return {(host, order[(place + 1) % len(order)]): volume for place, host in enumerate(order)}


def both(edges: list[tuple[str, str]], volume: float = 100.0) -> dict[tuple[str, str], float]:
    return {pair: volume for a, b in edges for pair in ((a, b), (b, a))}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.permutations(NAMES), st.integers(3, 8))
def test_a_ring_has_its_order(names: list[str], count: int) -> None:
    order = names[:count]
    shape = shape_of(ring(order))
    assert (shape.name, shape.workers, shape.whole) == ("ring", count, True)
    at = order.index(shape.hosts[0])
    assert list(shape.hosts) == order[at:] + order[:at]


@pytest.mark.parametrize("count", [4, 5, 8])
def test_a_ring_in_both_directions(count: int) -> None:
    order = [NAMES[(3 * place) % count] for place in range(count)]
    shape = shape_of(both([(order[place], order[(place + 1) % count]) for place in range(count)]))
    assert shape.name == "ring in both directions"
    links = {frozenset(pair) for pair in zip(shape.hosts, [*shape.hosts[1:], shape.hosts[0]], strict=True)}
    assert links == {frozenset((order[place], order[(place + 1) % count])) for place in range(count)}


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_star_has_its_hub_and_the_hub_is_no_worker(count: int) -> None:
    shape = shape_of(both([("h5", name) for name in NAMES if name != "h5"][:count]))
    assert (shape.name, shape.servers) == ("star", ("h5",))
    assert shape.workers == count
    assert volume_of(shape, 4_000_000.0).parameters == 1_000_000


def test_three_hosts_leave_star_and_tree_open() -> None:
    shape = shape_of(both([("h0", "h1"), ("h0", "h2")]))
    assert shape.name == "star"
    assert "looks the same" in shape.unseen


def test_a_tree() -> None:
    shape = shape_of(both([("h0", "h1"), ("h0", "h2"), ("h1", "h3"), ("h1", "h4"), ("h2", "h5")]))
    assert (shape.name, shape.workers) == ("tree", 6)
    # the equation's mean over the workers of a tree
    assert volume_of(shape, demand(1000, 6, "tree").worker_bytes).parameters == 1000


@pytest.mark.parametrize("count", [4, 5])
def test_all_to_all(count: int) -> None:
    shape = shape_of(dict.fromkeys(itertools.permutations(NAMES[:count], 2), 100.0))
    assert (shape.name, shape.workers) == ("all-to-all", count)


def test_three_hosts_leave_all_to_all_and_a_ring_both_ways_open() -> None:
    shape = shape_of(dict.fromkeys(itertools.permutations(NAMES[:3], 2), 100.0))
    assert shape.name == "all-to-all"
    assert "ring in both directions" in shape.unseen


@pytest.mark.parametrize("steps", [2, 3])
def test_halving_and_doubling(steps: int) -> None:
    edges = {
        (NAMES[host], NAMES[host ^ (1 << step)]): 800.0 / 2**step for host in range(1 << steps) for step in range(steps)
    }
    assert shape_of(edges).name == "recursive halving and doubling"


def test_a_chain_of_senders_is_irregular_and_has_no_equation() -> None:
    shape = shape_of({("h0", "h1"): 100.0, ("h1", "h2"): 100.0})
    assert (shape.name, shape.workers) == ("irregular", None)
    volume = volume_of(shape, 100.0)
    assert volume.parameters is None
    assert "no equation" in volume.why


def test_a_pair_is_a_ring_of_two() -> None:
    shape = shape_of(both([("h0", "h1")]))
    assert (shape.name, shape.workers) == ("pair", 2)
    assert volume_of(shape, 4_000.0).parameters == 1000


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_parameters_of_a_ring_come_from_equation_3_1(workers: int) -> None:
    shape = shape_of(ring(NAMES[:workers]))
    volume = volume_of(shape, demand(138_357_444, workers).worker_bytes)
    assert volume.parameters == 138_357_444
    assert volume.parameters_least == pytest.approx(0.98 * 138_357_444, rel=1e-6)


def test_one_host_of_a_ring_sees_its_neighbours_alone() -> None:
    shape = shape_of({("h3", "h0"): 100.0, ("h0", "h6"): 100.0}, only_host="h0")
    assert (shape.name, shape.hosts, shape.workers, shape.whole) == (
        "member of a ring",
        ("h3", "h0", "h6"),
        None,
        False,
    )
    assert "in what order, is not observable" in shape.unseen
    volume = volume_of(shape, 1200.0)
    # three workers send 4/3 of the gradients, endlessly many twice as much
    assert volume.parameters_most == 225
    assert volume.parameters_least == pytest.approx(0.98 * 150, abs=1)


def test_one_host_that_exchanges_with_one_other_leaves_it_open() -> None:
    shape = shape_of(both([("h0", "h1")]), only_host="h0")
    assert (shape.name, shape.whole) == ("one peer", False)
    assert "parameter server" in shape.unseen


def test_one_host_that_exchanges_with_several_leaves_it_open() -> None:
    shape = shape_of(both([("h0", "h1"), ("h0", "h2")]), only_host="h0")
    assert shape.name == "several peers"
    assert all(word in shape.unseen for word in ("star", "all to all", "ring in both directions"))


def test_one_direction_alone_is_said_to_be_one() -> None:
    shape = shape_of({("h0", "h1"): 100.0}, only_host="h0")
    assert shape.name == "one direction"
    assert "sends to h1" in shape.unseen


def test_ranks_of_one_address_are_one_host() -> None:
    shape = shape_of({("127.0.0.1", "127.0.0.1"): 100.0})
    assert shape.name == "one host"
    assert volume_of(shape, 100.0).parameters is None
