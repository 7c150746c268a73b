"""The flow-level simulation against closed forms."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.core.errors import UsageError
from ringtap.workload import message_graph as graphs
from ringtap.workload import simulation as simulations
from ringtap.workload import simulation_kernel
from ringtap.workload.collectives import Shape, message_graph, uneven_all_to_all
from ringtap.workload.simulation import CrossFlows, Simulation
from ringtap.workload.topologies import Topology, fat_tree, leaf_spine, ring, star, torus

pytestmark = pytest.mark.computes

RATE_BPS = 8e9  # a GB/s
MB = 10**6


def duration_s(name: str, shape: Shape, topology: Topology, latency_s: float = 0.0) -> float:
    graph = message_graph(name, shape)
    simulation = Simulation(topology, latency_s)
    collective = simulation.collective(simulation.place(graph, range(graph.endpoints)), shape.size_bytes)
    for worker in range(shape.workers):
        simulation.part(collective, worker)
    found = simulation.run()
    assert found.messages == len(graph)
    assert (found.begin_s == 0).all()
    expected = np.zeros(len(topology.links))
    for source, destination, size in zip(
        graph.source.tolist(), graph.destination.tolist(), graph.size_bytes, strict=True
    ):
        np.add.at(expected, list(topology.path(source, destination)), size)
    assert found.link_bytes == pytest.approx(expected)
    return float(found.end_s.max())


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 100])
def test_a_ring_on_a_star(workers: int) -> None:
    size = workers * MB
    ideal = 2 * (workers - 1) * MB / 1e9
    assert duration_s("ring", Shape(workers, size), star(workers, RATE_BPS)) == pytest.approx(ideal)
    latency = duration_s("ring", Shape(workers, size), star(workers, RATE_BPS), 1e-4)
    assert latency == pytest.approx(ideal + 2 * (workers - 1) * 1e-4)


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_halving_and_doubling_on_a_star(workers: int) -> None:
    found = duration_s("halving-doubling", Shape(workers, workers * MB), star(workers, RATE_BPS))
    assert found == pytest.approx(2 * (workers - 1) * MB / 1e9)


@pytest.mark.parametrize(("workers", "shards"), [(4, 1), (4, 2), (6, 3), (8, 8)])
def test_parameter_servers_on_a_star(workers: int, shards: int) -> None:
    """The server's link carries W M / K each way, and nothing is pulled before all is pushed."""
    shape = Shape(workers, 24 * MB, shards=shards)
    busiest = max(workers * 24 * MB / shards, 24 * MB)
    assert duration_s("parameter-server", shape, star(workers + shards, RATE_BPS)) == pytest.approx(2 * busiest / 1e9)


def test_a_tree_on_a_star() -> None:
    """Seven ranks: two children share a parent's link, twice up; a parent sends to two children, twice down."""
    assert duration_s("tree", Shape(7, 10 * MB), star(7, RATE_BPS)) == pytest.approx(8 * 10 * MB / 1e9)


def test_a_trunk_is_shared() -> None:
    """Of eight ranks in two leaves, two messages cross at a time, on a trunk of a quarter of four hosts' rates."""
    plain = duration_s("ring", Shape(8, 8 * MB), leaf_spine(8, RATE_BPS, 4, 1.0))
    assert plain == pytest.approx(14 * MB / 1e9)
    assert duration_s("ring", Shape(8, 8 * MB), leaf_spine(8, RATE_BPS, 4, 4.0)) == pytest.approx(plain)
    assert duration_s("ring", Shape(8, 8 * MB), leaf_spine(8, RATE_BPS, 4, 8.0)) == pytest.approx(2 * plain)


@pytest.mark.parametrize("topology", [ring(8, RATE_BPS), torus((2, 4), RATE_BPS), fat_tree(4, RATE_BPS)])
def test_neighbours_do_not_share_links(topology: Topology) -> None:
    assert duration_s("ring", Shape(8, 8 * MB), topology) == pytest.approx(14 * MB / 1e9, rel=0.51)


def test_max_min_fairness() -> None:
    """Three flows on two links: the flow over both gets half of the first one, the others what is left."""
    line = Topology("line", 3, ("a", "b"), (("h0", "h1"), ("h1", "h2")), (8e9, 24e9), lambda a, b: list(range(a, b)))
    graph = message_graph("send", Shape(2, 1 << 20))
    simulation = Simulation(line)
    for ends, size in (((0, 2), 5 * MB), ((0, 1), 20 * MB), ((1, 2), 25 * MB)):
        collective = simulation.collective(simulation.place(graph, ends), size)
        for worker in range(2):
            simulation.part(collective, worker)
    # rates 0.5, 0.5, 2.5 GB/s for 10 ms, then 1 and 3 GB/s
    assert simulation.run().end_s[::2] == pytest.approx([0.010, 0.025, 0.010])


def test_a_rank_that_comes_late_keeps_the_others_waiting() -> None:
    graph = message_graph("ring", Shape(4, 4 * MB))
    simulation = Simulation(star(4, RATE_BPS))
    collective = simulation.collective(simulation.place(graph, range(4)), 4 * MB)
    late = simulation.compute(1.0)
    parts = [simulation.part(collective, worker, [late] if worker == 2 else []) for worker in range(4)]
    ends = simulation.run().end_s[parts]
    assert ends.min() > 1.0
    assert ends.max() == pytest.approx(1.0 + 6 * MB / 1e9)


def test_many_collectives_at_once_need_more_room() -> None:
    """Arrays grow while the simulation runs: flows, events and running collectives."""
    graph = message_graph("all-to-all", Shape(20, 20 * MB))
    simulation = Simulation(star(20, RATE_BPS), 1e-6)
    placed = simulation.place(graph, range(20))
    parts = [simulation.part(simulation.collective(placed, MB), worker) for _ in range(1) for worker in range(0)]
    for _ in range(40):
        collective = simulation.collective(placed, 20 * MB)
        parts += [simulation.part(collective, worker) for worker in range(20)]
    found = simulation.run()
    assert found.messages == 40 * len(graph)
    # all links are busy all the time but for latencies
    assert found.end_s.max() == pytest.approx(40 * 19 * MB / 1e9, rel=0.01)


def test_paths_are_made_of_links_of_the_topology() -> None:
    leaves = (leaf_spine(9, 1e9, 4), leaf_spine(8, 1e9, 2, 2.0, 3))
    for topology in (star(5, 1e9), *leaves, torus((3, 2, 4), 1e9), fat_tree(4, 1e9), ring(7, 1e9)):
        assert len(topology.links) == len(topology.ends) == len(topology.rate_bps)
        for a in range(topology.hosts):
            for b in range(topology.hosts):
                if a == b:
                    continue
                path = topology.path(a, b)
                assert len(set(path)) == len(path) > 0
                nodes = [f"h{a}", *(topology.ends[link][1] for link in path)]
                assert [topology.ends[link] for link in path] == list(pairwise(nodes))
                assert nodes[-1] == f"h{b}"
    # two hosts at 1 Gbit/s share three links to spines, at half their rate in all
    assert sorted(set(leaves[1].rate_bps)) == pytest.approx([1e9 / 3, 1e9])
    around = torus((3, 2, 4), 1e9)
    assert len(around.path(0, 23)) == 1 + 1 + 1  # one step back in each dimension
    names = [fat_tree(4, 1e9).links[link] for link in fat_tree(4, 1e9).path(0, 15)]
    assert names[0] == "h0 up"
    assert names[-1] == "h15 down"
    assert "core" in names[2]
    assert "core" in names[3]


def crossing(*flows: tuple[int, int, float, float], after: dict[int, tuple[int, float]] | None = None) -> CrossFlows:
    """Flows of source, destination, bytes and begin; ``after`` has the flow and the delay of those that wait."""
    source, destination, size, begin = (np.array(column) for column in zip(*flows, strict=True))
    waits = [(after or {}).get(number, (-1, 0.0)) for number in range(len(flows))]
    found = np.array([flow for flow, _ in waits]), np.array([delay for _, delay in waits])
    return CrossFlows(source, destination, size.astype(float), begin.astype(float), *found)


def test_cross_traffic_shares_links_with_a_collective() -> None:
    """Two messages of 10 MB in 10 ms, of which the second one shares its link with 4 MB from 12 ms on."""
    graph = message_graph("send", Shape(2, 1 << 20))
    simulation = Simulation(star(3, RATE_BPS), cross=crossing((2, 1, 4 * MB, 0.012)))
    placed = simulation.place(graph, [0, 1])
    first, second = (simulation.collective(placed, 10 * MB) for _ in range(2))
    parts = [simulation.part(first, worker) for worker in range(2)]
    ends = [simulation.part(second, worker, [parts[worker]]) for worker in range(2)]
    found = simulation.run()
    assert found.end_s[ends] == pytest.approx([0.024, 0.024])
    assert (found.cross_begin_s.tolist(), found.cross_end_s) == ([0.012], pytest.approx([0.020]))
    assert found.link_bytes[4] == pytest.approx(20 * MB)  # only the collective's


def test_flows_wait_for_others() -> None:
    flows = crossing(
        (0, 1, 5 * MB, 0.001), (2, 3, MB, 0.002), (1, 0, MB, 0.002), (3, 3, MB, 0.002), (0, 2, MB, 0.02),
        after={2: (0, 0.003), 3: (1, 0.0), 4: (3, 0.001)},
    )  # fmt: skip
    found = Simulation(star(4, RATE_BPS), 1e-4, cross=flows).run()
    assert found.cross_begin_s == pytest.approx([0.001, 0.002, 0.0091, 0.0031, 0.02])
    assert found.cross_end_s == pytest.approx([0.006, 0.003, 0.0101, 0.0031, 0.021])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_one_link_is_processor_sharing(arrivals: list[tuple[int, int]]) -> None:
    """Flows that share one link get equal parts of it, as a loop over small steps of time finds, too."""
    arrivals = sorted(arrivals)
    flows = crossing(*((0, 1, size * MB, begin / 1e3) for begin, size in arrivals))
    found = Simulation(star(2, RATE_BPS), cross=flows).run()
    left, ends = np.array([size / 1e3 for _, size in arrivals]), np.zeros(len(arrivals))
    begins, now = np.array([begin / 1e3 for begin, _ in arrivals]), 0.0
    while (left > 0).any():
        active = (left > 0) & (begins <= now)
        coming = begins[(left > 0) & (begins > now)].min(initial=np.inf)
        until = min(coming, now + left[active].min() * active.sum() if active.any() else np.inf)
        left[active] -= (until - now) / max(active.sum(), 1)
        now = until
        ends[active & (left < 1e-12)], left[left < 1e-12] = now, 0.0
    assert found.cross_end_s == pytest.approx(ends)


def test_what_does_not_fit_into_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulations, "MAX_BYTES", 2**16)
    many = crossing(*((0, 1, MB, 0.0) for _ in range(3000)))
    with pytest.raises(UsageError, match="messages are under way at once"):
        Simulation(star(2, RATE_BPS), cross=many).run()
    monkeypatch.setattr(graphs, "MAX_MESSAGES", 1000)
    with pytest.raises(UsageError, match="100 workers has more than 1,000 messages"):
        message_graph("ring", Shape(100, MB))
    monkeypatch.setattr(graphs, "MAX_WAITS", 5000)
    message_graph("in-network", Shape(70, MB))
    with pytest.raises(UsageError, match="71 workers has more than 5,000 waits"):
        message_graph("in-network", Shape(71, MB))


@pytest.mark.parametrize("workers", [2, 3, 16])
def test_an_all_to_all_on_a_star_waits_for_one_latency(workers: int) -> None:
    """Each link carries all parts but one, and no message waits for another one."""
    ideal = (workers - 1) * MB / 1e9
    shape, network = Shape(workers, workers * MB), star(workers, RATE_BPS)
    assert duration_s("all-to-all", shape, network) == pytest.approx(ideal)
    assert duration_s("all-to-all", shape, network, 1e-2) == pytest.approx(ideal + 1e-2)
    small = duration_s("all-to-all", Shape(16, 1 << 16), star(16, 25e9), 10e-6)
    assert small == pytest.approx(15 / 16 * (1 << 16) * 8 / 25e9 + 10e-6)  # 29.7 us


def test_an_uneven_all_to_all_takes_what_its_busiest_link_does() -> None:
    """Rank 0 sends 10 MB in all, rank 2 receives 14 MB, and nobody sends to rank 3, which has no part in it."""
    graph = uneven_all_to_all([[7 * MB, 8 * MB, 2 * MB, 0], [0, 0, 12 * MB, 0], [MB, 0, 0, 0], [0, 0, 0, MB]])
    assert graph.sent_bytes.tolist() == [10 * MB, 12 * MB, MB, 0]
    assert graph.received_bytes.tolist() == [MB, 8 * MB, 14 * MB, 0]
    simulation = Simulation(star(4, RATE_BPS), 1e-4)
    collective = simulation.collective(simulation.place(graph, range(4)), float(graph.chunk_bytes.sum()))
    parts = [simulation.part(collective, worker) for worker in range(4)]
    found = simulation.run()
    # the 2 MB share both of their links until 4 ms; rank 1 has sent 12 MB 10 ms after that
    assert found.end_s[parts] == pytest.approx([0.0101, 0.0141, 0.0141, 0.0])
    assert found.link_bytes == pytest.approx([10 * MB, 12 * MB, MB, 0, MB, 8 * MB, 14 * MB, 0])


def test_many_small_simulations_load_machine_code_as_one_large_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulations, "_work", 0.0)
    monkeypatch.setattr(simulations, "MAX_INTERPRETED", 100)
    loops = [simulations._loop_for(60) for _ in range(2)]
    assert loops == [simulation_kernel.advance, simulation_kernel.compiled()]
