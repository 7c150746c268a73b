"""Builds message graphs: the messages of a collective, and for each one the messages that it waits for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.core.errors import UsageError

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]  # of messages, endpoints and chunks: with 20 million of them, half the memory counts
Flags = npt.NDArray[np.bool_]
MAX_MESSAGES = 20_000_000  # of a graph; a simulation needs about 0.3 kB for each
MAX_WAITS = 150_000_000  # messages that messages wait for; about 40 bytes each


@dataclass(frozen=True, eq=False)
class MessageGraph:
    """Messages between endpoints, in an order in which each one comes after those that it waits for.

    Endpoints 0 to ``workers`` - 1 are the workers. Parameter servers and switches that add come after them. The data
    of a collective is divided into chunks, and a message carries neighbouring ones.

    Attributes:
        workers: number of workers.
        endpoints: number of endpoints.
        chunk_bytes: bytes of each chunk, shape (chunks,).
        source: sender of each message, shape (messages,), as all arrays but the last two.
        destination: its receiver.
        first_chunk: first chunk that it carries.
        chunks: number of chunks that it carries.
        adds: True if the receiver adds the data to its own, False if it takes them over.
        step: length of the longest chain of messages before it.
        after: numbers of the messages that it waits for, of all messages one after the other.
        after_start: place in ``after`` at which those of each message begin, shape (messages + 1,).
    """

    workers: int
    endpoints: int
    chunk_bytes: Integers
    source: Numbers
    destination: Numbers
    first_chunk: Numbers
    chunks: Numbers
    adds: Flags
    step: Numbers
    after: Numbers
    after_start: Integers

    def __len__(self) -> int:
        return len(self.source)

    @property
    def steps(self) -> int:
        """Number of messages in the longest chain."""
        return int(self.step.max()) + 1 if len(self) else 0

    @property
    def size_bytes(self) -> Integers:
        """Bytes of each message, shape (messages,)."""
        upto = starts_of(self.chunk_bytes)
        found: Integers = upto[self.first_chunk + self.chunks] - upto[self.first_chunk]
        return found

    @property
    def sent_bytes(self) -> Integers:
        """Bytes that each endpoint sends, shape (endpoints,)."""
        return self._sum(self.source)

    @property
    def received_bytes(self) -> Integers:
        """Bytes that each endpoint receives, shape (endpoints,)."""
        return self._sum(self.destination)

    def waits_for(self, message: int) -> Numbers:
        """Return the numbers of the messages that a message waits for."""
        return self.after[self.after_start[message] : self.after_start[message + 1]]

    def of_size(self, size_bytes: int) -> MessageGraph:
        """Return the same graph for data of another size."""
        return replace(self, chunk_bytes=divided(size_bytes, len(self.chunk_bytes)))

    def operations(self) -> Operations:
        """Return the sends and receives of the messages, by endpoint."""
        ends = np.stack([self.source, self.destination], axis=1)  # a message is sent, then received
        order = np.argsort(ends.ravel(), kind="stable")
        endpoint_start = starts_of(np.bincount(ends.ravel(), minlength=self.endpoints))
        local = np.empty(len(order), np.int32)
        local[order] = np.arange(len(order)) - np.repeat(endpoint_start[:-1], np.diff(endpoint_start))
        waiting = np.repeat(np.arange(len(self)), np.diff(self.after_start))
        receives = ~self._is_at_sender(waiting, self.after)
        endpoint = np.where(receives, self.destination[waiting], self.source[waiting])
        awaited = 2 * self.after + (self.destination[self.after] == endpoint)
        after_order = np.argsort(np.argsort(order)[2 * waiting + receives], kind="stable")
        counts = np.bincount(2 * waiting + receives, minlength=len(order))
        is_awaited = np.zeros(len(order), np.bool_)
        is_awaited[awaited] = True
        keys, pair = np.unique(self.source.astype(np.int64) * self.endpoints + self.destination, return_inverse=True)
        by_pair = np.argsort(pair, kind="stable")
        pair_start = starts_of(np.bincount(pair, minlength=len(keys)))
        turn = np.empty(len(self), np.int32)
        turn[by_pair] = np.arange(len(self)) - np.repeat(pair_start[:-1], np.diff(pair_start))
        return Operations(
            endpoint_start, (order >> 1).astype(np.int32), order & 1 == 0, starts_of(counts[order]),
            local[awaited[after_order]], ~is_awaited[order], turn, pair.astype(np.int32),
            np.stack(np.divmod(keys, self.endpoints), axis=1), np.diff(pair_start),
        )  # fmt: skip

    def end_ns(self, ready_ns: Integers, message_ns: Integers) -> Integers:
        """Return when each endpoint has its last message, if links have room for all and a send takes no time.

        Args:
            ready_ns: time at which each endpoint begins, shape (endpoints,).
            message_ns: time from a send to its receipt, shape (messages,).
        """
        sent_ns, received_ns = ready_ns[self.source], ready_ns[self.destination]
        order = np.argsort(self.step, kind="stable")
        for step in np.split(order, np.cumsum(np.bincount(self.step))[:-1]):
            waits = np.diff(self.after_start)[step]
            places = np.arange(waits.sum()) + np.repeat(self.after_start[step] - starts_of(waits)[:-1], waits)
            waiting, before = np.repeat(step, waits), self.after[places]
            at_sender = self._is_at_sender(waiting, before)
            endpoint = np.where(at_sender, self.source[waiting], self.destination[waiting])
            known_ns = np.where(self.destination[before] == endpoint, received_ns[before], sent_ns[before])
            np.maximum.at(sent_ns, waiting[at_sender], known_ns[at_sender])
            np.maximum.at(received_ns, waiting[~at_sender], known_ns[~at_sender])
            received_ns[step] = np.maximum(received_ns[step], sent_ns[step] + message_ns[step])
        found_ns = ready_ns.copy()
        np.maximum.at(found_ns, self.source, sent_ns)
        np.maximum.at(found_ns, self.destination, received_ns)
        return found_ns

    def _is_at_sender(self, message: Integers, before: Numbers) -> Flags:
        """Return True where the sender of a message waits for one before; else the receiver does."""
        found: Flags = (self.source[before] == self.source[message]) | (
            self.destination[before] == self.source[message]
        )
        return found

    def _sum(self, endpoint: Numbers) -> Integers:
        total = np.zeros(self.endpoints, np.int64)
        np.add.at(total, endpoint, self.size_bytes)
        return total


@dataclass(frozen=True, eq=False)
class Operations:
    """The sends and receives of a message graph, endpoint by endpoint, in the order of the messages.

    Attributes:
        endpoint_start: place at which the operations of each endpoint begin, shape (endpoints + 1,).
        message: message of each operation, shape (operations,).
        is_send: True for a send, False for a receive.
        after_start: place in ``after`` at which those of each operation begin, shape (operations + 1,).
        after: the operations that each one waits for, counted from the first one of its endpoint.
        is_last: True if no other one waits for it.
        turn: number of messages before each message from the same endpoint to the same one, shape (messages,).
        pair: number of its pair of endpoints.
        pairs: source and destination of each pair, shape (pairs, 2).
        pair_messages: its messages, shape (pairs,).
    """

    endpoint_start: Integers
    message: Numbers
    is_send: Flags
    after_start: Integers
    after: Numbers
    is_last: Flags
    turn: Numbers
    pair: Numbers
    pairs: Integers
    pair_messages: Integers


class GraphBuilder:
    """A message graph that grows by batches of messages, each after all messages that it waits for.

    Args:
        workers: number of workers.
        chunk_bytes: bytes of each chunk.
        others: number of endpoints that are not workers.
    """

    def __init__(self, workers: int, chunk_bytes: Integers, others: int = 0) -> None:
        self._workers, self._endpoints, self._chunk_bytes = workers, workers + others, chunk_bytes
        self._batches: list[tuple[Numbers, ...]] = []
        self._adds: list[Flags] = []
        self._after: list[Numbers] = []
        self._counts: list[Numbers] = []
        self._step = np.empty(0, np.int32)
        self._messages = 0

    def send(
        self,
        source: npt.ArrayLike,
        destination: npt.ArrayLike,
        first_chunk: npt.ArrayLike,
        chunks: npt.ArrayLike = 1,
        *,
        adds: bool,
        after: npt.ArrayLike | None = None,
    ) -> Integers:
        """Add messages, and return their numbers.

        Args:
            source: their senders.
            destination: their receivers.
            first_chunk: first chunk that each one carries.
            chunks: number of chunks that each one carries.
            adds: True if receivers add the data to their own.
            after: numbers of messages that each one waits for, shape (messages, any number), with -1 for none.

        Raises:
            UsageError: there are too many messages.
        """
        given = (np.asarray(each, np.int32) for each in (source, destination, first_chunk, chunks))
        columns = tuple(np.atleast_1d(each).ravel() for each in np.broadcast_arrays(*given))
        count = len(columns[0])
        self._grow(count)
        waits = np.full((count, 1), -1) if after is None else np.asarray(after, np.int64).reshape(count, -1)
        known = waits >= 0
        steps = np.where(known, self._step[np.where(known, waits, 0)], -1)
        self._batches.append(columns)
        self._adds.append(np.full(count, adds))
        self._after.append(waits[known].astype(np.int32))
        self._counts.append(known.sum(axis=1, dtype=np.int32))
        numbers = np.arange(self._messages - count, self._messages)
        self._step[numbers] = steps.max(axis=1) + 1
        return numbers

    def _grow(self, count: int) -> None:
        self._messages += count
        check_room(self._workers, self._messages)
        if self._messages > len(self._step):
            larger = np.empty(max(2 * len(self._step), self._messages), np.int32)
            larger[: len(self._step)] = self._step
            self._step = larger

    def build(self) -> MessageGraph:
        """Return the graph."""

        def joined(parts: list[Numbers]) -> Numbers:
            return np.concatenate(parts) if parts else np.empty(0, np.int32)

        source, destination, first, chunks = (joined([batch[i] for batch in self._batches]) for i in range(4))
        return MessageGraph(
            self._workers, self._endpoints, self._chunk_bytes, source, destination, first, chunks,
            np.concatenate(self._adds) if self._adds else np.empty(0, np.bool_),
            self._step[: self._messages].copy(), joined(self._after),
            starts_of(joined(self._counts)),
        )  # fmt: skip


def starts_of(counts: npt.NDArray[Any]) -> Integers:
    """Return the place at which each of several groups begins, and the end of the last one."""
    found: Integers = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    return found


def divided(size_bytes: int, parts: int) -> Integers:
    """Return sizes of parts that differ by at most one byte and add up to a size, shape (parts,)."""
    edges = [size_bytes * part // parts for part in range(parts + 1)]
    return np.diff(np.array(edges, np.int64)).astype(np.int64)


def check_room(workers: int, messages: int, waits: int = 0) -> None:
    """Check that there is room for a graph of messages that wait for some number of others in all.

    Raises:
        UsageError: there is none.
    """
    for count, most, what in ((messages, MAX_MESSAGES, "messages"), (waits, MAX_WAITS, "waits for messages")):
        if count > most:
            raise UsageError(
                f"a collective of {workers:,} workers has more than {most:,} {what} by this algorithm, for which there "
                "is no room: choose double-tree, halving-doubling or hierarchical, or fewer workers"
            )
