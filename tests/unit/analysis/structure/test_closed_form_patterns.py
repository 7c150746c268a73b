"""Patterns by name: closed forms against message graphs, in any order of hosts, and from streams in time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.structure import closed_form_patterns
from ringtap.analysis.structure.detect_training_streams import Member, Training
from ringtap.analysis.structure.period_from_silences import Periodicity
from ringtap.analysis.structure.structure import Structure, find_structure, only_host
from ringtap.analysis.structure.structure_text import describe
from ringtap.analysis.structure.topology import ExchangeTopology, shape_of
from ringtap.workload.collectives import Shape, message_graph
from ringtap.workload.message_graph import MessageGraph
from tests.unit.structure_makers import to_stream, together, web_search

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

SIZE = 240_240
# divisible by the chunks of every pattern of up to 16 hosts
EXACT = 720_720 * 8
GRAPHS = [
    ("ring", {}, "ring"),
    ("all-to-all", {}, "all-to-all"),
    ("halving-doubling", {}, "recursive halving and doubling"),
    ("tree", {}, "tree"),
    ("double-tree", {}, "double binary tree"),
    ("hierarchical", {"group": 2}, "hierarchical"),
    ("hierarchical", {"group": 3}, "hierarchical"),
    ("hierarchical", {"group": 4}, "hierarchical"),
    ("parameter-server", {"shards": 1}, "star"),
    ("parameter-server", {"shards": 2}, "sharded parameter server"),
    ("parameter-server", {"shards": 3}, "sharded parameter server"),
    ("in-network", {"pieces": 4}, "star"),
]


def fits(name: str, counts: dict[str, int], workers: int) -> bool:
    """True if the pattern exists for so many workers, and looks like no other one."""
    group = counts.get("group", 1)
    if name == "halving-doubling":
        return workers & (workers - 1) == 0
    # two servers and two workers look like a ring both ways, without the times of their bytes
    return workers >= 2 * group and workers % group == 0 and workers > max(2, counts.get("shards", 1))


def graph_of(name: str, counts: dict[str, int], workers: int, size: int = EXACT) -> MessageGraph:
    return message_graph(name, Shape(workers, size, **counts))


def sizes(graph: MessageGraph) -> np.ndarray:
    edges = np.concatenate([[0], graph.chunk_bytes.cumsum()])
    return np.asarray(edges[graph.first_chunk + graph.chunks] - edges[graph.first_chunk])


def matrix(graph: MessageGraph) -> np.ndarray:
    hosts = int(max(graph.source.max(), graph.destination.max())) + 1
    found = np.zeros((hosts, hosts))
    np.add.at(found, (graph.source, graph.destination), sizes(graph))
    return found


@pytest.mark.parametrize("workers", [2, 3, 4, 6, 8, 12, 13, 16])
def test_closed_forms_are_the_bytes_of_the_message_graphs(workers: int) -> None:
    forms = {"ring": closed_form_patterns.ring(workers), "double-tree": closed_form_patterns.double_tree(workers)}
    if workers & (workers - 1) == 0:
        forms["halving-doubling"] = closed_form_patterns.halving(workers)
    for name, form in forms.items():
        assert np.allclose(form.matrix * EXACT, matrix(graph_of(name, {}, workers)))
    # each part goes once to be summed up, and once as a sum
    assert np.allclose(
        closed_form_patterns.all_to_all(workers).matrix * EXACT, 2 * matrix(graph_of("all-to-all", {}, workers))
    )
    for group in range(2, workers // 2 + 1):
        if workers % group == 0:
            wanted = matrix(graph_of("hierarchical", {"group": group}, workers))
            assert np.allclose(closed_form_patterns.hierarchical(workers // group, group).matrix * EXACT, wanted)
    for shards in range(2, workers):
        # the graph has the servers last
        given = np.roll(closed_form_patterns.sharded(workers, shards).matrix, -shards, axis=(0, 1))
        assert np.allclose(given * EXACT, matrix(graph_of("parameter-server", {"shards": shards}, workers)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(GRAPHS), st.integers(3, 16), st.integers(0, 2**32 - 1))
def test_a_pattern_has_its_name_in_any_order_of_hosts(
    which: tuple[str, dict[str, int], str], workers: int, seed: int
) -> None:
    name, counts, wanted = which
    if not fits(name, counts, workers):
        return
    bytes_between = matrix(graph_of(name, counts, workers))
    random = np.random.default_rng(seed)
    hosts = random.permutation(len(bytes_between))
    noise = random.uniform(0.97, 1.03, bytes_between.shape)  # headers and retransmissions
    edges = {
        (f"h{hosts[a]}", f"h{hosts[b]}"): bytes_between[a, b] * noise[a, b]
        for a, b in zip(*bytes_between.nonzero(), strict=True)
    }
    shape = shape_of(edges)
    if name == "tree" and workers == 3:
        wanted = "star"
        assert "tree" in shape.unseen
        workers -= 1
    assert (shape.name, shape.workers) == (wanted, workers)
    assert shape.error is not None
    assert shape.error < 0.07  # 3 % of an edge, and 3 % of all of them
    if wanted == "sharded parameter server":
        servers = {f"h{hosts[place]}" for place in range(workers, len(hosts))}
        # as many servers as workers: which ones they are is not in the bytes
        assert set(shape.servers) == servers or "is not observable" in shape.unseen
    if wanted == "hierarchical" and counts["group"] != workers // counts["group"]:
        groups = hosts.reshape(-1, counts["group"])
        found = {frozenset(shape.hosts[at : at + shape.group]) for at in range(0, workers, shape.group)}
        assert found == {frozenset(f"h{host}" for host in group) for group in groups}
    sent = sum(volume for (source, _), volume in edges.items() if source not in shape.servers) / workers
    assert shape.sent_per_byte is not None
    if wanted != "all-to-all" and (wanted, workers) != ("star", 2):
        assert sent / shape.sent_per_byte == pytest.approx(EXACT, rel=0.03)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(3, 9), st.integers(0, 2**32 - 1))
def test_bytes_in_no_pattern_have_no_name_and_end_soon(hosts: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    volumes = random.uniform(1, 10, (hosts, hosts)) * (random.random((hosts, hosts)) < 0.7)
    np.fill_diagonal(volumes, 0)
    if (volumes > 0).sum() < 4:
        return
    shape = shape_of({(f"h{a}", f"h{b}"): volumes[a, b] for a, b in zip(*volumes.nonzero(), strict=True)})
    assert shape.name == "irregular" or shape.error is None or shape.error <= closed_form_patterns.TOLERANCE


def test_many_hosts_with_equal_bytes_end_without_a_name() -> None:
    """A graph in which all hosts look alike, and which is none of the patterns: the search must give up."""
    count = 64
    edges = {(f"h{a:02}", f"h{(a + step) % count:02}"): 1.0 for a in range(count) for step in (1, 3, 7)}
    assert shape_of(edges).name == "irregular"


def played(
    graph: MessageGraph, iterations: int = 20, seed: int = 0, rate_bps: float = 250e6
) -> list[tuple[str, str, list[tuple[float, float, int]]]]:
    """The parts (begin, length, bytes) between hosts, if each message takes its time and waits for those before."""
    random = np.random.default_rng(seed)
    volumes = sizes(graph)
    took = volumes * 8 / rate_bps
    ready = np.zeros(len(volumes))
    for number in range(len(volumes)):  # messages come after those that they wait for
        before = graph.waits_for(number)
        ready[number] = max((ready[one] + took[one] for one in before), default=0.0) + 3e-4
    length = float((ready + took).max())
    parts: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
    now = 0.5
    for _ in range(iterations):
        for bucket in range(2):
            for number, size in enumerate(volumes):
                pair = int(graph.source[number]), int(graph.destination[number])
                begin = now + bucket * (length + 0.004) + ready[number] + abs(random.normal(0, 1e-4))
                parts.setdefault(pair, []).append((begin, float(took[number]), int(size) + 48))
        now += 2 * length + 0.05 * (1 + 0.05 * random.standard_normal())
    return [(f"10.0.0.{a + 1}", f"10.0.0.{b + 1}", each) for (a, b), each in parts.items()]


def structure_of(graph: MessageGraph, cross: bool = False, seed: int = 0) -> Structure:
    """The structure of a job that was captured at each of its hosts."""
    streams = []
    for source, destination, parts in played(graph, seed=seed):
        stream = to_stream(source, destination, parts)
        object.__setattr__(stream, "seen_by", frozenset([source, destination]))
        object.__setattr__(stream, "copies", 2)
        streams.append(stream)
    seconds = max(float(stream.bins[-1]) for stream in streams) / 1e3
    others = web_search("10.9.0.1", "10.0.0.1", 30e6, seconds, seed) if cross else []
    # a rendezvous and barriers
    others.append(to_stream("10.0.0.2", "10.0.0.1", [(0.1, 0.01, 900), (seconds, 0.01, 400)], "29500 > 40000"))
    return find_structure(together(*streams, *others))


@pytest.mark.parametrize(
    ("name", "counts", "workers", "wanted"),
    [
        ("ring", {}, 4, "a ring of 4 hosts, 10.0.0.1 > 10.0.0.2 > 10.0.0.3 > 10.0.0.4 > 10.0.0.1"),
        ("halving-doubling", {}, 4, "recursive halving and doubling among 4 hosts"),
        ("tree", {}, 4, "a binary tree of 4 hosts with the root 10.0.0.1"),
        ("tree", {}, 7, "a binary tree of 7 hosts with the root 10.0.0.1"),
        ("double-tree", {}, 6, "a double binary tree of 6 hosts"),
        ("hierarchical", {"group": 2}, 4, "a hierarchy of groups of 2 among 4 hosts, "),
        ("parameter-server", {}, 3, "a parameter server or in-network aggregation at 10.0.0.4 with 3 workers"),
        ("in-network", {"pieces": 4}, 4, "a parameter server or in-network aggregation at 10.0.0.5 with 4 workers"),
        ("parameter-server", {"shards": 2}, 2, "2 parameter servers, 10.0.0.3 and 10.0.0.4, with 2 workers"),
        ("parameter-server", {"shards": 3}, 3, "3 parameter servers, "),
    ],
)
def test_streams_in_time_have_their_pattern(name: str, counts: dict[str, int], workers: int, wanted: str) -> None:
    # bytes of both directions in a bin of 1 ms count as at once, so that transfers must last far longer
    size = 16 * SIZE if (name, counts) == ("parameter-server", {}) else SIZE
    found = structure_of(graph_of(name, counts, workers, size), cross=workers < 5)
    lines = describe(found)
    assert lines[0].startswith(f"A training job: {wanted}"), lines[0]
    assert found.shape.whole
    parameters = found.volume.parameters
    assert parameters is not None
    # two buckets; headers of 48 bytes before messages of 10 kB and more
    assert parameters == pytest.approx(2 * size / 4, rel=0.02)
    if name == "in-network":
        assert "while it still sends" in found.shape.evidence
    elif wanted.startswith("a parameter server"):
        assert "after it has sent its own" in found.shape.evidence
    if name == "parameter-server" and workers == 3 and counts:
        assert set(found.shape.servers) == {"10.0.0.4", "10.0.0.5", "10.0.0.6"}


@pytest.mark.parametrize("stages", [3, 4])
def test_a_pipeline_is_told_from_a_tree_by_the_order_of_its_bytes(stages: int) -> None:
    links = [(stage, stage + 1) for stage in range(stages - 1)]
    order = [*links, *((b, a) for a, b in reversed(links))]
    found: dict[tuple[int, int], list[tuple[float, float, int]]] = {pair: [] for pair in order}
    random = np.random.default_rng(stages)
    now = 0.5
    for _ in range(20):
        for place, pair in enumerate(order):
            found[pair].append((now + place * 0.006, 0.004, 120_000))
        now += len(order) * 0.006 + 0.05 + 0.002 * random.random()
    streams = [to_stream(f"10.0.0.{9 - a}", f"10.0.0.{9 - b}", parts) for (a, b), parts in found.items()]
    for stream in streams:
        object.__setattr__(stream, "seen_by", frozenset([stream.source, stream.destination]))
    shape = find_structure(together(*streams)).shape
    assert (shape.name, shape.hosts) == ("pipeline", tuple(f"10.0.0.{9 - stage}" for stage in range(stages)))
    assert shape.sent_per_byte is None


def star(seen_by: dict[str, list[str]], copies: int = 1) -> Training:
    """A job of two workers and a server, as captures at some places show it."""
    members = []
    for worker, places in seen_by.items():
        for source, destination in ((worker, "server"), ("server", worker)):
            stream = to_stream(source, destination, [(0.1, 0.01, 1000)])
            object.__setattr__(stream, "seen_by", frozenset(places))
            object.__setattr__(stream, "copies", copies)
            members.append(Member(stream, None, 1000.0, True))
    starts, found = np.array([0, 1]), np.array([True, True])
    rhythm = Periodicity(1000.0, starts, found, 10.0, 10.0, 1.0, 1.0)
    return Training(tuple(members), starts, found, members[0], rhythm, False)


def test_a_star_is_whole_if_its_workers_were_captured_too() -> None:
    assert only_host(star({"w1": ["at w1", "at server"], "w2": ["at w2", "at server"]}, copies=2)) is None
    assert only_host(star({"w1": ["at w1"], "w2": ["at w2"]})) is None
    # exchanges between the workers would not be seen
    assert only_host(star({"w1": ["at server"], "w2": ["at server"]})) == "server"
    assert only_host(star({"w1": ["first hour", "second hour"], "w2": ["first hour", "second hour"]})) == "server"


def test_two_servers_with_two_workers_need_times() -> None:
    edges = {
        (a, b): 1.0 for pair in (("w1", "s1"), ("w1", "s2"), ("w2", "s1"), ("w2", "s2")) for a, b in (pair, pair[::-1])
    }
    assert shape_of(edges).name == "ring in both directions"
    first = {("w1", "s1"), ("w1", "s2"), ("w2", "s1"), ("w2", "s2")}
    shape: ExchangeTopology = shape_of(edges, leading=first)
    assert (shape.name, shape.servers) == ("sharded parameter server", ("s1", "s2"))
