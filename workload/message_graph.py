"""Message graphs: the messages of a collective, and for each one the messages that it waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringtap.errors import UsageError

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
        upto = np.concatenate(([0], np.cumsum(self.chunk_bytes)))
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

    def _sum(self, endpoint: Numbers) -> Integers:
        total = np.zeros(self.endpoints, np.int64)
        np.add.at(total, endpoint, self.size_bytes)
        return total


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
            np.concatenate(([0], np.cumsum(joined(self._counts), dtype=np.int64))),
        )  # fmt: skip


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
