"""Makes message graphs of collectives: one function per algorithm, from the number of workers and the bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.units import counted
from ringtap.workload.message_graph import GraphBuilder, Integers, MessageGraph, check_room, divided

NONE = -1


@dataclass(frozen=True)
class Shape:
    """Size and layout of a collective.

    Attributes:
        workers: number of workers.
        size_bytes: bytes of each worker's data; of all-gather and reduce-scatter, those of the whole.
        group: workers per node, for ``hierarchical``.
        shards: parameter servers.
        pieces: pieces in which trees and switches pass on the data, one after the other.
    """

    workers: int
    size_bytes: int
    group: int = 1
    shards: int = 1
    pieces: int = 1


def ring(shape: Shape) -> MessageGraph:
    """All-reduce around a ring: reduce-scatter, then all-gather (Patarasuk and Yuan, 2009)."""
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, shape.workers))
    _ring_all_reduce(builder, np.arange(shape.workers)[None], 1, None)
    return builder.build()


def half_ring(shape: Shape, *, adds: bool) -> MessageGraph:
    """Reduce-scatter around a ring, the first half of an all-reduce, or all-gather; worker i has chunk i at first."""
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, shape.workers))
    _ring_steps(builder, np.arange(shape.workers)[None], 1, None, 0, adds=adds)
    return builder.build()


def _ring_all_reduce(builder: GraphBuilder, rings: Integers, width: int, after: Integers | None) -> Integers:
    scattered = _ring_steps(builder, rings, width, after, 0, adds=True)
    return _ring_steps(builder, rings, width, scattered, 1, adds=False)


def _ring_steps(
    builder: GraphBuilder, rings: Integers, width: int, after: Integers | None, shift: int, *, adds: bool
) -> Integers:
    """Pass parts on around rings, until each rank has sent all parts but one.

    Args:
        builder: the graph.
        rings: ranks of each ring, shape (rings, ranks).
        width: chunks per part.
        after: messages that the first one of each rank waits for, shape (rings, ranks, any number).
        shift: the part that a rank sends first, counted from its own.
        adds: True if the receiver adds.

    Returns:
        The last message that each rank received and the last one that it sent, shape (rings, ranks, 2).
    """
    count = rings.shape[1]
    to, places = np.roll(rings, -1, axis=1), np.arange(count)
    for step in range(count - 1):
        parts = np.broadcast_to((places + shift - step) % count, rings.shape)
        waits = None if after is None else after.reshape(rings.size, -1)
        sent = builder.send(rings, to, parts * width, width, adds=adds, after=waits).reshape(rings.shape)
        # a rank goes on with what its predecessor sent, after its own message before
        after = np.stack([np.roll(sent, 1, axis=1), sent], axis=-1)
    assert after is not None
    return after


def halving_doubling(shape: Shape) -> MessageGraph:
    """All-reduce by recursive halving and doubling (Thakur, Rabenseifner and Gropp, 2005).

    Raises:
        UsageError: the number of workers is not a power of two.
    """
    workers = shape.workers
    if workers & (workers - 1):
        raise UsageError(f"halving-doubling needs a power of two of workers, not {workers}: use ring")
    builder = GraphBuilder(workers, divided(shape.size_bytes, workers))
    ranks = np.arange(workers)
    done: Integers | None = None  # what each rank received and sent last
    distance = workers // 2
    while distance:  # halving: each rank keeps the half that contains its own chunk
        partner = ranks ^ distance
        sent = builder.send(ranks, partner, partner // distance * distance, distance, adds=True, after=done)
        done = np.column_stack([sent[partner], sent])
        distance //= 2
    distance = 1
    while distance < workers:
        partner = ranks ^ distance
        sent = builder.send(ranks, partner, ranks // distance * distance, distance, adds=False, after=done)
        done = np.column_stack([sent[partner], sent])
        distance *= 2
    return builder.build()


def tree(shape: Shape) -> MessageGraph:
    """All-reduce by reduction and broadcast on a binary tree, in which rank i has the children 2i + 1 and 2i + 2."""
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, shape.pieces))
    parents = (np.arange(shape.workers) - 1) // 2
    _tree_all_reduce(builder, parents, 0, shape.pieces)
    return builder.build()


def double_tree(shape: Shape) -> MessageGraph:
    """All-reduce of each half of the data on a binary tree of its own (Sanders, Speck and Träff, 2009).

    Every rank has children in at most one of the two trees.
    """
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, 2 * shape.pieces))
    for number, parents in enumerate(two_trees(shape.workers)):
        _tree_all_reduce(builder, parents, number * shape.pieces, shape.pieces)
    return builder.build()


def two_trees(workers: int) -> tuple[Integers, Integers]:
    """Return the parent of each rank in two binary trees, -1 for the root; no rank has children in both.

    In the first one, ranks with children are odd. The second one is the first one mirrored (an even number of workers)
    or shifted by one rank.
    """
    first = np.full(workers, NONE)
    odd = workers if workers % 2 else workers - 1
    root = _in_order(first, 0, odd)
    if odd < workers:
        first[root] = workers - 1
    ranks = np.arange(workers)
    place = (ranks + 1) % workers if workers % 2 else workers - 1 - ranks  # of each rank in the first tree
    rank_at = np.argsort(place)
    above = first[place]
    return first, np.where(above == NONE, NONE, rank_at[above])


def _in_order(parents: Integers, low: int, high: int) -> int:
    """Set the parents of the ranks of an odd range, so that those with children are odd, and return its root."""
    count = high - low
    if count == 1:
        return low
    half = count // 2
    root = low + (half if half % 2 else half - 1)
    for begin, end in ((low, root), (root + 1, high)):
        parents[_in_order(parents, begin, end)] = root
    return root


def _tree_all_reduce(builder: GraphBuilder, parents: Integers, first_chunk: int, pieces: int) -> None:
    up: Sequence[Integers] = _up(builder, parents, first_chunk, pieces)
    _down(builder, parents, first_chunk, pieces, up)


def _levels(parents: Integers) -> list[Integers]:
    """Return the ranks at each depth of a tree, the root first."""
    levels = [np.flatnonzero(parents == NONE)]
    while len(below := np.flatnonzero(np.isin(parents, levels[-1]))):
        levels.append(below)
    return levels


def _children(parents: Integers) -> Integers:
    """Return up to two children of each rank, shape (workers, 2), with -1 for none."""
    children = np.full((len(parents), 2), NONE)
    for rank, parent in enumerate(parents):
        if parent != NONE:
            children[parent, int(children[parent, 0] != NONE)] = rank
    return children


def _looked_up(numbers: Integers, ranks: Integers) -> Integers:
    """Return the entry of each rank, and -1 for rank -1."""
    return np.where(ranks == NONE, NONE, numbers[ranks])


def _up(builder: GraphBuilder, parents: Integers, first_chunk: int, pieces: int) -> list[Integers]:
    """Reduce pieces towards the root; return each rank's message of every piece, -1 for the root."""
    children, levels = _children(parents), _levels(parents)
    every: list[Integers] = []
    before = np.full(len(parents), NONE)
    for piece in range(pieces):
        sent = np.full(len(parents), NONE)
        for level in levels[:0:-1]:
            after = np.column_stack([_looked_up(sent, children[level]), before[level]])
            sent[level] = builder.send(level, parents[level], first_chunk + piece, adds=True, after=after)
        every.append(sent)
        before = sent
    return every


def _down(
    builder: GraphBuilder, parents: Integers, first_chunk: int, pieces: int, up: Sequence[Integers] | None = None
) -> None:
    """Broadcast pieces from the root, after the messages that it has received of each."""
    children, levels = _children(parents), _levels(parents)
    root = int(levels[0][0])
    before = np.full(len(parents), NONE)
    for piece in range(pieces):
        got = np.full(len(parents), NONE)
        for level in levels[1:]:
            above = parents[level]
            after = np.column_stack([got[above], before[level]])
            if up is not None:
                reduced = _looked_up(up[piece], children[root])
                after = np.column_stack([after, np.where((above == root)[:, None], reduced, NONE)])
            got[level] = builder.send(above, level, first_chunk + piece, adds=False, after=after)
        before = got


def broadcast(shape: Shape) -> MessageGraph:
    """Broadcast from rank 0 on a binary tree."""
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, shape.pieces))
    _down(builder, (np.arange(shape.workers) - 1) // 2, 0, shape.pieces)
    return builder.build()


def parameter_server(shape: Shape) -> MessageGraph:
    """Push to and pull from K parameter servers, each with a shard of the data (Li et al., OSDI 2014).

    Raises:
        UsageError: there are more shards than workers, or there is no room for so many workers.
    """
    if not 1 <= shape.shards <= shape.workers:
        raise UsageError(
            f"{counted(shape.shards, 'shard')} for {counted(shape.workers, 'worker')}: give 1 to {shape.workers} shards"
        )
    return _through_others(shape, shape.shards, 1)


def in_network(shape: Shape) -> MessageGraph:
    """Send all data to a switch, which adds them and sends the sum to each worker (SwitchML, NSDI 2021).

    Raises:
        UsageError: there is no room for so many workers.
    """
    return _through_others(shape, 1, shape.pieces)


def _through_others(shape: Shape, others: int, pieces: int) -> MessageGraph:
    """Send data to endpoints that add them, in pieces one after the other, and the sums back."""
    workers = shape.workers
    check_room(workers, 2 * workers * others * pieces, workers * workers * others * pieces)
    builder = GraphBuilder(workers, divided(shape.size_bytes, others * pieces), others)
    worker, other = (each.ravel() for each in np.meshgrid(np.arange(workers), np.arange(others), indexing="ij"))
    pushed = pulled = None
    for piece in range(pieces):
        chunk = other * pieces + piece
        pushed = builder.send(worker, workers + other, chunk, adds=True, after=pushed)
        by_other = pushed.reshape(workers, others).T[other]  # what reached the endpoint of each message
        after = by_other if pulled is None else np.column_stack([by_other, pulled])
        pulled = builder.send(workers + other, worker, chunk, adds=False, after=after)
    return builder.build()


def hierarchical(shape: Shape) -> MessageGraph:
    """All-reduce around a ring in each group, around one of the groups' first ranks, and broadcast in each group.

    Raises:
        UsageError: the workers do not make two or more full groups.
    """
    workers, group = shape.workers, shape.group
    if group < 1 or workers % group or workers // group < 2:
        raise UsageError(f"{counted(workers, 'worker')} in groups of {group} do not make two or more full groups")
    nodes = workers // group
    chunks = math.lcm(group, nodes)
    builder = GraphBuilder(workers, divided(shape.size_bytes, chunks))
    rings = np.arange(workers).reshape(nodes, group)
    within = np.full((nodes, group, 1), NONE)  # the last messages of each rank in its group
    if group > 1:
        within = _ring_all_reduce(builder, rings, chunks // group, None)
    # a first rank takes part in the ring between groups when that of its own has ended
    ready = np.concatenate([within[:, 0], np.roll(within[:, 0], -1, axis=0)], axis=1)
    got = [_ring_all_reduce(builder, rings[None, :, 0], chunks // nodes, ready[None])[0]]
    for place in range(1, group):
        above = (place - 1) // 2
        after = np.concatenate([got[above], within[:, place]], axis=1)
        got.append(builder.send(rings[:, above], rings[:, place], 0, chunks, adds=False, after=after)[:, None])
    return builder.build()


def all_to_all(shape: Shape) -> MessageGraph:
    """Exchange equal parts between all pairs of workers, all of them at once.

    NCCL sends them as one group, and gloo without waiting, so that none waits for the latency of another one.
    """
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, shape.workers))
    source, destination = _pairs(shape.workers)
    builder.send(source, destination, destination, adds=False)
    return builder.build()


def uneven_all_to_all(split_bytes: Sequence[Sequence[int]]) -> MessageGraph:
    """Exchange parts of any sizes between pairs of workers, all of them at once; no part means no message.

    Args:
        split_bytes: bytes from each worker to each worker.
    """
    sizes = np.array(split_bytes, np.int64)
    builder = GraphBuilder(len(sizes), sizes.ravel())
    source, destination = _pairs(len(sizes))
    has_data = sizes[source, destination] > 0
    source, destination = source[has_data], destination[has_data]
    builder.send(source, destination, source * len(sizes) + destination, adds=False)
    return builder.build()


def _pairs(workers: int) -> tuple[Integers, Integers]:
    """Return all pairs of workers, each worker's next one first, so that no two of a round have the same receiver."""
    source = np.tile(np.arange(workers), workers - 1)
    return source, (source + np.repeat(np.arange(1, workers), workers)) % workers


def send(shape: Shape) -> MessageGraph:
    """Send all data from the first of two workers to the second one."""
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, 1))
    builder.send(0, 1, 0, adds=False)
    return builder.build()


def between_first_and_others(shape: Shape, *, gathers: bool) -> MessageGraph:
    """Send equal parts from each worker to rank 0 (gather), or from it to each (scatter)."""
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, shape.workers))
    others = np.arange(1, shape.workers)
    first = np.zeros_like(others)
    builder.send(*((others, first) if gathers else (first, others)), others, adds=False)
    return builder.build()


def reduce(shape: Shape) -> MessageGraph:
    """Reduce to rank 0 on a binary tree."""
    builder = GraphBuilder(shape.workers, divided(shape.size_bytes, shape.pieces))
    _up(builder, (np.arange(shape.workers) - 1) // 2, 0, shape.pieces)
    return builder.build()


ALGORITHMS: dict[str, Callable[[Shape], MessageGraph]] = {
    "ring": ring,
    "halving-doubling": halving_doubling,
    "tree": tree,
    "double-tree": double_tree,
    "hierarchical": hierarchical,
    "parameter-server": parameter_server,
    "in-network": in_network,
    "reduce-scatter": partial(half_ring, adds=True),
    "all-gather": partial(half_ring, adds=False),
    "broadcast": broadcast,
    "all-to-all": all_to_all,
    "reduce": reduce,
    "gather": partial(between_first_and_others, gathers=True),
    "scatter": partial(between_first_and_others, gathers=False),
    "send": send,
}


def messages_of_one(collective: str, workers: int) -> MessageGraph | None:
    """Return the messages that one worker sends, of a collective in which each one does the same at the same time.

    Where links are all alike, each worker receives a message when it has sent its own, so that each message of a chain
    waits for the one before. Endpoint 0 is the worker, and endpoint 1 stands for those to which it sends.

    Returns:
        The messages; None: workers of this collective do different things.
    """
    steps = workers - 1
    chains = {"ring": [1] * 2 * steps, "reduce-scatter": [1] * steps, "all-gather": [1] * steps}
    if collective == "halving-doubling" and workers & steps == 0:
        down = [workers >> level for level in range(1, workers.bit_length())]
        chains[collective] = [*down, *reversed(down)]
    builder = GraphBuilder(1, divided(workers << 20, workers), others=1)
    if collective == "all-to-all":
        builder.send(0, np.ones(steps), 0, adds=False)
        return builder.build()
    if collective not in chains:
        return None
    before = None
    for chunks in chains[collective]:
        before = builder.send(0, 1, 0, chunks, adds=False, after=before)
    return builder.build()


def message_graph(collective: str, shape: Shape) -> MessageGraph:
    """Return the message graph of a collective.

    Raises:
        UsageError: the collective is unknown, or does not go with the shape.
    """
    if collective not in ALGORITHMS:
        hint = did_you_mean(collective, ALGORITHMS)
        raise UsageError(f"collective {collective!r} is unknown: {hint}choose one of {', '.join(ALGORITHMS)}")
    if shape.workers < 2:
        raise UsageError(f"with {counted(shape.workers, 'worker')} there is nothing to send: give at least 2 workers")
    if shape.size_bytes < 0:
        raise UsageError(f"{shape.size_bytes} bytes are below 0")
    return ALGORITHMS[collective](shape)
