"""Message graphs of every collective: the table of bytes and steps, and what executing them leaves on each rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.core.errors import UsageError
from ringtap.workload.collectives import ALGORITHMS, NONE, Shape, message_graph, two_trees
from ringtap.workload.message_graph import MessageGraph

pytestmark = [pytest.mark.computes, pytest.mark.long]

ALL_REDUCE = ("ring", "halving-doubling", "tree", "double-tree", "hierarchical", "parameter-server", "in-network")


@st.composite
def all_reduces(draw: st.DrawFn) -> tuple[str, Shape]:
    name = draw(st.sampled_from(ALL_REDUCE))
    workers = draw(st.integers(2, 16))
    if name == "halving-doubling":
        workers = 2 ** draw(st.integers(1, 4))
    group = shards = 1
    if name == "hierarchical":
        group = draw(st.sampled_from([g for g in range(1, workers) if workers % g == 0]))
    if name == "parameter-server":
        shards = draw(st.integers(1, workers))
    return name, Shape(workers, draw(st.integers(0, 10**7)), group, shards, draw(st.integers(1, 4)))


def executed(graph: MessageGraph) -> np.ndarray:
    """Count of each worker's part of each chunk at each endpoint, after all messages in order."""
    data = np.zeros((graph.endpoints, len(graph.chunk_bytes), graph.workers), int)
    for worker in range(graph.workers):
        data[worker, :, worker] = 1
    for message in range(len(graph)):
        assert (graph.waits_for(message) < message).all()  # so there is an order: nothing waits for ever
        source, destination = graph.source[message], graph.destination[message]
        chunks = slice(graph.first_chunk[message], graph.first_chunk[message] + graph.chunks[message])
        data[destination, chunks] = data[source, chunks] + graph.adds[message] * data[destination, chunks]
    return data


@given(all_reduces())
@settings(max_examples=150, deadline=None)
def test_every_worker_has_the_full_sum_once(case: tuple[str, Shape]) -> None:
    graph = message_graph(*case)
    assert (executed(graph)[: graph.workers] == 1).all()
    assert graph.sent_bytes.sum() == graph.received_bytes.sum() == graph.size_bytes.sum()
    assert graph.chunk_bytes.sum() == case[1].size_bytes


@given(all_reduces(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_any_order_that_keeps_the_dependencies_gives_the_same(case: tuple[str, Shape], random) -> None:
    """A message that waits for too little would be sent before its data are complete."""
    graph = message_graph(*case)
    waits = [set(graph.waits_for(message).tolist()) for message in range(len(graph))]
    data = executed(MessageGraph(**(vars(graph) | {"source": graph.source[:0]})))
    ready = [message for message in range(len(graph)) if not waits[message]]
    done = 0
    while ready:
        message = ready.pop(random.randrange(len(ready)))
        done += 1
        source, destination = graph.source[message], graph.destination[message]
        chunks = slice(graph.first_chunk[message], graph.first_chunk[message] + graph.chunks[message])
        data[destination, chunks] = data[source, chunks] + graph.adds[message] * data[destination, chunks]
        for other in range(len(graph)):
            if message in waits[other]:
                waits[other].remove(message)
                if not waits[other]:
                    ready.append(other)
    assert done == len(graph)
    assert (data[: graph.workers] == 1).all()


@given(st.integers(2, 16), st.integers(1, 10**7), st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_and_steps_are_those_of_the_table(workers: int, size: int, data: st.DataObject) -> None:
    ring = message_graph("ring", Shape(workers, size))
    # parts differ by a byte each
    assert ring.sent_bytes == pytest.approx(2 * (workers - 1) / workers * size, abs=2 * workers)
    assert ring.steps == 2 * (workers - 1)
    if workers & (workers - 1) == 0:
        halving = message_graph("halving-doubling", Shape(workers, size))
        assert halving.sent_bytes == pytest.approx(2 * (workers - 1) / workers * size, abs=2 * workers)
        assert halving.steps == 2 * (workers.bit_length() - 1)
    tree = message_graph("tree", Shape(workers, size))
    children = np.bincount((np.arange(1, workers) - 1) // 2, minlength=workers)
    assert tree.sent_bytes.tolist() == ((np.arange(workers) > 0) + children).dot(np.eye(workers) * size).tolist()
    assert tree.steps == 2 * (workers.bit_length() - 1)
    double = message_graph("double-tree", Shape(workers, size))
    assert (double.sent_bytes <= 2 * size + 2).all()
    shards = data.draw(st.integers(1, workers))
    server = message_graph("parameter-server", Shape(workers, size, shards=shards))
    assert server.sent_bytes[:workers].tolist() == server.received_bytes[:workers].tolist() == [size] * workers
    assert server.sent_bytes[workers:] == pytest.approx(workers * size / shards, abs=workers)
    assert server.steps == 2
    switch = message_graph("in-network", Shape(workers, size))
    assert switch.sent_bytes.tolist() == [*[size] * workers, workers * size]
    assert switch.steps == 2


@pytest.mark.parametrize("workers", range(2, 40))
def test_no_rank_has_children_in_both_trees(workers: int) -> None:
    parents = two_trees(workers)
    inner = [set(each[each != NONE].tolist()) for each in parents]
    assert not inner[0] & inner[1]
    for each in parents:
        assert (each == NONE).sum() == 1
        assert np.bincount(each[each != NONE], minlength=workers).max() <= 2
        depth = 0
        at = np.arange(workers)
        while (at != NONE).any():
            at = np.where(at == NONE, NONE, each[at])
            depth += 1
        assert depth <= workers.bit_length() + 1


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_other_collectives_deliver_what_they_say(workers: int) -> None:
    shape, every = Shape(workers, 1000, pieces=2), np.arange(workers)
    scattered = executed(message_graph("reduce-scatter", shape))
    assert all((scattered[rank, (rank + 1) % workers] == 1).all() for rank in every)
    gathered = executed(message_graph("all-gather", shape))
    assert all((gathered[rank, chunk] == np.eye(workers)[chunk]).all() for rank in every for chunk in every)
    assert (executed(message_graph("broadcast", shape))[:, :, 0] == 1).all()
    assert (executed(message_graph("reduce", shape))[0] == 1).all()
    exchange = message_graph("all-to-all", shape)
    assert {(a, b) for a, b in zip(exchange.source, exchange.destination, strict=True)} == {
        (a, b) for a in every for b in every if a != b
    }


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("halving-doubling", Shape(6, 10), "power of two of workers, not 6"),
        ("parameter-server", Shape(3, 10, shards=4), "4 shards for 3 workers"),
        ("hierarchical", Shape(6, 10, group=4), "in groups of 4"),
        ("hierarchical", Shape(4, 10, group=4), "two or more"),
        ("ring", Shape(1, 10), "at least 2 workers"),
        ("ring", Shape(4, -1), "below 0"),
        ("rings", Shape(4, 10), "did you mean 'ring'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, shape: Shape, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        message_graph(name, shape)


def test_every_algorithm_has_a_summary() -> None:
    assert all(function.__doc__ for function in ALGORITHMS.values())
