"""Models the order of tensors: the iteration time under FIFO, TIC, TAC, P3, ByteScheduler, and the least under any.

An iteration is the backward pass of layers L to 1 and the forward pass of layers 1 to L. The gradient of a layer is
ready when its backward pass ends. Its transfer must end before the layer's next forward pass. Layer L's forward pass
needs all transfers, so none is under way when the next backward pass begins, and one iteration is the steady state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from operator import add
from typing import NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.thesis_neural_networks import BUCKET_BYTES, FIRST_BUCKET_BYTES, GRADIENT_BYTES, ring_bytes
from ringtap.workload.model_workloads import bucket_bounds

METHODS = ("fifo", "tic", "tac", "p3", "bytescheduler")
COLLECTIVES = ("parameter-server", "ring")
SLICE_PARAMETERS = 50_000  # of P3 in its paper
MAX_MESSAGES = 1_000_000  # of an iteration
MAX_WORKERS = 1_000_000
# ByteScheduler's search: partitions in slices of P3, credits in partitions; with the first of both it is P3
_PARTITIONS, _CREDITS = (1, 4, 16, 64), (0, 2, 4)
_BUCKETS_MIB = (200, 100, 50, 10, 5, 2, 1)


class LayerTensor(NamedTuple):
    """Gradient of a layer, and the layer's computation.

    Attributes:
        name: its name.
        size_bytes: bytes of the gradient.
        forward_s: time of the layer's forward pass.
        backward_s: time of the layer's backward pass.
    """

    name: str
    size_bytes: int
    forward_s: float
    backward_s: float


class LogGP(NamedTuple):
    """Transfers of a worker, with the parameters of LogGP (Alexandrov et al., SPAA 1995).

    Attributes:
        rate_bps: rate of its link, in each direction.
        factor: bytes that it sends per byte of a gradient.
        latency_s: time of a message of a gradient beside its transmission, in which other messages can be sent.
        overhead_s: time in which the worker is busy with a message before its transmission, and begins no other.
    """

    rate_bps: float
    factor: float = 1.0
    latency_s: float = 0.0
    overhead_s: float = 0.0

    def transmission_s(self, size_bytes: float) -> float:
        """Return the time for which a message with a part of a gradient occupies the link."""
        return size_bytes * self.factor * 8 / self.rate_bps


def network_of(workers: int | None, rate_bps: float, latency_s: float, overhead_s: float = 0.0) -> LogGP:
    """Return the network of a ring all-reduce, or of parameter servers if the number of workers is None.

    A ring sends 2 (N-1)/N of the bytes in 2 (N-1) messages in turn (Patarasuk and Yuan 2009). To and from parameter
    servers, each byte goes once per direction, in 2 messages in turn; a pull goes on behind its push.
    """
    steps, factor = (2, 1.0) if workers is None else (2 * (workers - 1), ring_bytes(1.0, workers))
    return LogGP(rate_bps, factor, steps * latency_s, steps * overhead_s)


class GraphOperation(NamedTuple):
    """Operation of a graph of computations.

    Attributes:
        duration_s: its time.
        transfers: numbers of the transfers whose data it reads.
        after: numbers of the operations before it whose results it reads.
    """

    duration_s: float
    transfers: tuple[int, ...]
    after: tuple[int, ...] = ()


def forward_pass(tensors: Sequence[LayerTensor]) -> list[GraphOperation]:
    """Return the forward pass of layers: each needs its tensor and the layer before it."""
    return [GraphOperation(each.forward_s, (i,), (i - 1,) if i else ()) for i, each in enumerate(tensors)]


def _needed(operations: Sequence[GraphOperation]) -> list[int]:
    """Return the transfers that each operation needs, itself or through others, as bits."""
    found: list[int] = []
    for operation in operations:
        bits = 0
        for transfer in operation.transfers:
            bits |= 1 << transfer
        for before in operation.after:
            bits |= found[before]
        found.append(bits)
    return found


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def tic_order(operations: Sequence[GraphOperation], transfers: int) -> list[int]:
    """Return the order of transfers by the graph alone (TIC of TicTac, MLSys'19).

    A transfer comes the earlier, the fewer transfers the first operation behind it needs. The paper leaves out
    operations that need one transfer only; here such a transfer comes first, since it lets computation begin.

    Args:
        operations: each after those whose results it reads.
        transfers: number of transfers.
    """
    fewest = [transfers + 1] * transfers
    for bits in _needed(operations):
        for transfer in _numbers(bits):
            fewest[transfer] = min(fewest[transfer], bits.bit_count())
    return sorted(range(transfers), key=fewest.__getitem__)


def tac_order(operations: Sequence[GraphOperation], transfer_s: Sequence[float]) -> list[int]:
    """Return the order of transfers by the graph and times (TAC of TicTac, MLSys'19).

    Of two transfers, the one that makes computation wait less comes first: a before b if
    min(P(b), M(a)) < min(P(a), M(b)), with the transfer's time M and the computation P that it alone still holds up.
    If both are equal, the one whose next operation misses less transfer time does (the paper's M+).

    Args:
        operations: each after those whose results it reads.
        transfer_s: time of each transfer.
    """
    count, order = len(transfer_s), []
    outstanding = (1 << count) - 1
    waiting = [(sum(transfer_s[i] for i in _numbers(bits)), bits, operation.duration_s)
               for bits, operation in zip(_needed(operations), operations, strict=True) if bits]  # fmt: skip
    while outstanding:
        enabled_s, impending_s, unknown = [0.0] * count, [inf] * count, outstanding
        for missing_s, bits, duration_s in sorted(waiting):
            if bits & (bits - 1) == 0:
                enabled_s[bits.bit_length() - 1] += duration_s
            elif bits & unknown:
                for transfer in _numbers(bits & unknown):
                    impending_s[transfer] = missing_s
                unknown &= ~bits
        first = -1
        for each in _numbers(outstanding):
            if first >= 0:
                waits_s = min(enabled_s[first], transfer_s[each]), min(enabled_s[each], transfer_s[first])
                if (waits_s[0], impending_s[each]) >= (waits_s[1], impending_s[first]):
                    continue
            first = each
        order.append(first)
        outstanding &= ~(1 << first)
        waiting = [(missing_s - transfer_s[first] * (bits >> first & 1), bits & outstanding, duration_s)
                   for missing_s, bits, duration_s in waiting if bits & outstanding]  # fmt: skip
    return order


def _until_end(values: Sequence[float]) -> list[float]:
    """Return the sum of each value and those after it."""
    return list(accumulate(reversed(values)))[::-1]


def ready_s(tensors: Sequence[LayerTensor]) -> list[float]:
    """Return the times at which gradients are ready, since the begin of the backward pass."""
    return _until_end([each.backward_s for each in tensors])


def remaining_s(tensors: Sequence[LayerTensor]) -> list[float]:
    """Return the time of the forward pass from each layer to the last one."""
    return _until_end([each.forward_s for each in tensors])


def completion_s(
    sizes_bytes: Sequence[int],
    begin_s: Sequence[float],
    order: Sequence[int],
    network: LogGP,
    piece_bytes: int | None = None,
    credit_bytes: int = 0,
) -> list[float]:
    """Return the times at which transfers end, sent by priority through one link.

    The next message is a piece of the transfer with the highest priority among those that are ready. It is handed to
    the link, which sends in this order, as soon as the bytes in flight are below the credit, or none is in flight.
    A message is in flight until its transmission has ended and its latency is over.

    Args:
        sizes_bytes: bytes of each transfer; one without bytes ends when it is ready.
        begin_s: time at which each is ready.
        order: their numbers, the highest priority first.
        network: the link.
        piece_bytes: bytes of a message at most; None: each transfer is one message.
        credit_bytes: the credit; 0: one message at a time.
    """
    rank = {number: place for place, number in enumerate(order)}
    coming = deque(sorted((number for number in order if sizes_bytes[number]), key=begin_s.__getitem__))
    done_s, left_bytes = list(begin_s), list(sizes_bytes)
    ready: list[tuple[int, int]] = []
    in_flight: deque[tuple[float, int]] = deque()
    now_s, free_s, flying_bytes = 0.0, 0.0, 0
    while coming or ready:
        while coming and begin_s[coming[0]] <= now_s:
            number = coming.popleft()
            heappush(ready, (rank[number], number))
        while in_flight and in_flight[0][0] <= now_s:
            flying_bytes -= in_flight.popleft()[1]
        if ready and (not in_flight or flying_bytes < credit_bytes):
            number = ready[0][1]
            size_bytes = min(left_bytes[number], piece_bytes or left_bytes[number])
            now_s += network.overhead_s
            free_s = max(free_s, now_s) + network.transmission_s(size_bytes)
            done_s[number] = free_s + network.latency_s
            in_flight.append((done_s[number], size_bytes))
            flying_bytes += size_bytes
            left_bytes[number] -= size_bytes
            if not left_bytes[number]:
                heappop(ready)
        else:
            now_s = min(in_flight[0][0] if in_flight else inf, begin_s[coming[0]] if coming else inf)
    return done_s


class ScheduledIteration(NamedTuple):
    """An iteration under one method.

    Attributes:
        iteration_s: its time.
        order: numbers of the tensors, the highest priority first.
        completion_s: time at which each transfer ends, since the begin of the backward pass.
        piece_bytes: bytes of a message at most; None: whole tensors.
        credit_bytes: bytes in flight; 0: one message at a time.
    """

    iteration_s: float
    order: list[int]
    completion_s: list[float]
    piece_bytes: int | None = None
    credit_bytes: int = 0


def schedule(
    tensors: Sequence[LayerTensor],
    order: list[int],
    network: LogGP,
    piece_bytes: int | None = None,
    credit_bytes: int = 0,
) -> ScheduledIteration:
    """Return an iteration in which transfers have priorities, as of `completion_s`.

    Raises:
        UsageError: the transfers have too many messages.
    """
    sizes_bytes = [each.size_bytes for each in tensors]
    if piece_bytes is not None and sum(-(-size // piece_bytes) for size in sizes_bytes) > MAX_MESSAGES:
        raise UsageError(
            f"messages of {piece_bytes:,} bytes are more than {MAX_MESSAGES:,} in an iteration: give larger ones"
        )
    done_s = completion_s(sizes_bytes, ready_s(tensors), order, network, piece_bytes, credit_bytes)
    total_s = max(map(add, done_s, remaining_s(tensors)))
    return ScheduledIteration(total_s, order, done_s, piece_bytes, credit_bytes)


def schedules(
    tensors: Sequence[LayerTensor],
    network: LogGP,
    slice_bytes: int = SLICE_PARAMETERS * GRADIENT_BYTES,
    partition_bytes: int | None = None,
    credit_bytes: int | None = None,
) -> dict[str, ScheduledIteration]:
    """Return an iteration under each method.

    Args:
        tensors: tensors in the order of the forward pass.
        network: the network.
        slice_bytes: size of P3's slices.
        partition_bytes: size of ByteScheduler's partitions; None: the best of 1, 4, 16 and 64 slices.
        credit_bytes: ByteScheduler's credit; None: the best of one message, 2 and 4 partitions.

    Raises:
        UsageError: the transfers have too many messages.
    """
    operations, by_layer = forward_pass(tensors), list(range(len(tensors)))
    beside_s = network.overhead_s + network.latency_s
    tac = tac_order(operations, [network.transmission_s(each.size_bytes) + beside_s for each in tensors])
    partitions = [partition_bytes] if partition_bytes else [slice_bytes * count for count in _PARTITIONS]
    tried = [
        schedule(tensors, by_layer, network, partition, credit)
        for partition in partitions
        for credit in ([credit_bytes] if credit_bytes else [partition * count for count in _CREDITS])
    ]
    return {
        "fifo": schedule(tensors, by_layer[::-1], network),
        "tic": schedule(tensors, tic_order(operations, len(tensors)), network),
        "tac": schedule(tensors, tac, network),
        "p3": schedule(tensors, by_layer, network, slice_bytes),
        "bytescheduler": min(tried, key=lambda each: each.iteration_s),
    }


def bound_s(tensors: Sequence[LayerTensor], network: LogGP) -> float:
    """Return a time that no order and no partition can beat: the overlap is as good as the dependencies allow.

    The transfers of layers 1 to j begin when the backward pass of layer j ends at the earliest, and when the last one
    has ended, the forward pass of layers j to L is still to come. The largest of these sums over j is Carlier's bound
    for one machine (European J. of Operational Research, 1982), which preemption reaches (Horn, 1974): priority by
    layer, with infinitely small messages without latency, is optimal, as ByteScheduler (SOSP'19) proves.
    """
    sent_s = list(accumulate(network.transmission_s(each.size_bytes) * (each.size_bytes > 0) for each in tensors))
    beside_s = network.overhead_s + network.latency_s
    ends_s = (
        begin_s + time_s + beside_s * (time_s > 0) + rest_s
        for begin_s, time_s, rest_s in zip(ready_s(tensors), sent_s, remaining_s(tensors), strict=True)
    )
    return max(sent_s[-1], *ends_s)


def bucket_times(tensors: Sequence[LayerTensor], network: LogGP) -> dict[int, float]:
    """Return the iteration time by the size of DDP's buckets in bytes, the default first.

    A bucket is one message, sent in the order of readiness. Only among those of the default is the first one smaller.
    """
    sizes_bytes = [each.size_bytes for each in reversed(tensors)]
    begin_s, rest_s = ready_s(tensors)[::-1], remaining_s(tensors)[::-1]
    found = {}
    for size_bytes in (BUCKET_BYTES, *(count * 2**20 for count in _BUCKETS_MIB)):
        first_bytes = FIRST_BUCKET_BYTES if size_bytes == BUCKET_BYTES else size_bytes
        bounds = list(bucket_bounds(sizes_bytes, size_bytes, first_bytes))
        sums = [sum(sizes_bytes[begin:end]) for begin, end in bounds]
        done_s = completion_s(sums, [begin_s[end - 1] for _, end in bounds], range(len(bounds)), network)
        times_s = [last_s + rest_s[end - 1] for last_s, (_, end) in zip(done_s, bounds, strict=True)]
        found[size_bytes] = max([begin_s[-1] + rest_s[-1], *times_s])
    return found
