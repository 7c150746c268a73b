"""Exchanges gradients by the message graph of any all-reduce algorithm, in jobs that use DistributedDataParallel.

A job calls `exchange_gradients` once after it has made its model. Parameter servers and switches that add are processes
of their own, which join the job's workers at ``MASTER_ADDR`` and ``MASTER_PORT``:

    python -m ringtap.workload.ddp_message_graph_exchange --collective parameter-server --workers 4 --number 0
"""

# no annotations from the future: DistributedDataParallel compares those of the hook with classes

import argparse
import atexit
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import as_command
from ringtap.core.units import counted, whole_number
from ringtap.workload.command_options import add_algorithms, algorithms
from ringtap.workload.execution_trace import Collective
from ringtap.workload.lowering import Algorithms
from ringtap.workload.message_graph import MessageGraph

_TIMEOUT = timedelta(minutes=30)  # PyTorch's own of gloo
_JOIN_TIMEOUT = timedelta(minutes=5)
_END_S = 2.0
_SIZE, _FIRST = 0, 1  # tags: of sizes, and of the first message of a graph
_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _Lane(NamedTuple):
    """Messages that end in the order in which they begin.

    Messages that add are on another lane than those that do not: in a double tree, sums go down one tree while data go
    up the other one, between the same two workers.
    """

    peer: int  # the other endpoint
    sends: bool  # True if this endpoint sends
    adds: bool  # True if the receiver adds


@dataclass(frozen=True)
class _Step:
    """A message of this endpoint."""

    number: int  # its number in the graph
    lane: _Lane  # its lane
    begin: int  # first element that it carries
    end: int  # element after the last one
    after: frozenset[int]  # messages of this endpoint for which it waits


def _steps(graph: MessageGraph, endpoint: int) -> list[_Step]:
    """Return the messages of an endpoint in the order of the graph, those that it receives first."""
    edges = [0, *graph.chunk_bytes.cumsum().tolist()]
    found = []
    for number in ((graph.source == endpoint) | (graph.destination == endpoint)).nonzero()[0].tolist():
        source, destination = int(graph.source[number]), int(graph.destination[number])
        after = set()
        for before in graph.waits_for(number).tolist():
            ends = {int(graph.source[before]), int(graph.destination[before])}
            # the sender waits, or the receiver for what the sender has no part in
            if endpoint == (source if source in ends else destination):
                after.add(before)
        first = int(graph.first_chunk[number])
        begin, end = edges[first], edges[first + int(graph.chunks[number])]
        sends = source == endpoint
        lane = _Lane(destination if sends else source, sends, bool(graph.adds[number]))
        found.append(_Step(number, lane, begin, end, frozenset(after)))
    return sorted(found, key=lambda step: step.lane.sends)


class _Running:
    """A collective under way: its data, and the messages that have not ended."""

    def __init__(self, data: torch.Tensor, steps: Sequence[_Step]) -> None:
        self.data = data
        self._left, self._waits = len(steps), {step.number: len(step.after) for step in steps}
        self._after: dict[int, list[_Step]] = defaultdict(list)
        for step in steps:
            for before in step.after:
                self._after[before].append(step)
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def end(self, step: _Step, received: torch.Tensor | None) -> list[_Step]:
        """Note the end of a message, and return those that now wait for no other one."""
        with self._changed:
            if received is not None:
                self.data[step.begin : step.end].add_(received)
            ready = []
            for other in self._after[step.number]:
                self._waits[other.number] -= 1
                if not self._waits[other.number]:
                    ready.append(other)
            self._left -= 1
            if not self._left:
                self._changed.notify_all()
        return ready

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all messages have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._left)
        if self._error:
            raise self._error


_Work = tuple[_Running, _Step, Any, torch.Tensor | None]  # a message that has begun, and what it is received into
_exchanges: dict[str, "GradientExchange"] = {}  # of this process, by algorithm; models share them


class GradientExchange:
    """All-reduce of one endpoint over gloo's sends and receives, one collective after the other.

    Args:
        store: store of the job.
        endpoint: worker, or ``workers`` plus the number of a parameter server or switch.
        workers: number of workers.
        algorithms: the algorithm of all-reduce.

    Raises:
        UsageError: the algorithm does not go with the number of workers.
    """

    def __init__(self, store: Any, endpoint: int, workers: int, algorithms: Algorithms) -> None:
        self._endpoint, self._workers, self._algorithms = endpoint, workers, algorithms
        self._graph(workers)  # before anybody waits for the others
        endpoints = workers + algorithms.others
        while isinstance(store, dist.PrefixStore):  # the one at MASTER_ADDR and MASTER_PORT itself
            store = store.underlying_store
        # beside the job's group, to which parameter servers and switches do not belong
        place = dist.PrefixStore(f"ringtap {algorithms.key}", store)
        self._group = dist.ProcessGroupGloo(place, endpoint, endpoints, _TIMEOUT)
        self._steps: dict[int, list[_Step]] = {}
        self._lanes: dict[_Lane, SimpleQueue[_Work | None]] = {}
        self._lock = threading.Lock()
        self._buckets: SimpleQueue[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._start("ringtap exchange", self._exchange_buckets)
        atexit.register(self._close)  # a thread that the interpreter's end meets in gloo aborts the process

    def begin(self, data: torch.Tensor) -> "torch.futures.Future[torch.Tensor]":
        """Begin to sum up data, shape (elements,), in place, after those before; the future gets them at the end.

        Raises:
            UsageError: the data are not in this process's memory, or of a type without a sum.
        """
        if data.device.type != "cpu" or data.dtype not in _TYPES:
            raise UsageError(f"gradients of {data.dtype} on {data.device} cannot be exchanged: only floats on CPUs can")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._buckets.put((data, future))
        return future

    def serve(self) -> None:
        """Add what workers send, until they end; for parameter servers and switches."""
        size = torch.zeros(2, dtype=torch.int64)
        while True:
            try:
                self._group.recv([size], 0, _SIZE).wait()
            except RuntimeError:  # the job has ended
                return
            self._run(torch.zeros(int(size[0]), dtype=_TYPES[int(size[1])]))

    def _start(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, name=name, daemon=True))
        self._threads[-1].start()

    def _close(self) -> None:
        """End the threads, but for those that wait for others."""
        self._buckets.put(None)
        for lane in self._lanes.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(_END_S)

    def _graph(self, elements: int) -> MessageGraph:
        return self._algorithms.graph(Collective.ALL_REDUCE, self._workers, elements)

    def _exchange_buckets(self) -> None:
        while (bucket := self._buckets.get()) is not None:
            data, future = bucket
            try:
                if self._endpoint == 0:
                    self._tell_size(data)
                self._run(data)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(data)

    def _tell_size(self, data: torch.Tensor) -> None:
        size = torch.tensor([data.numel(), _TYPES.index(data.dtype)])
        for other in range(self._workers, self._workers + self._algorithms.others):
            self._group.send([size], other, _SIZE).wait()

    def _run(self, data: torch.Tensor) -> None:
        elements = data.numel()
        if elements not in self._steps:
            self._steps[elements] = _steps(self._graph(elements), self._endpoint)
        steps = self._steps[elements]
        running = _Running(data, steps)
        self._begin(running, [step for step in steps if not step.after])
        running.wait()

    def _begin(self, running: _Running, steps: Iterable[_Step]) -> None:
        """Begin messages that wait for no other one.

        Receives begin long before their data come, as soon as the collective does. Gloo sends data when it knows that
        the receiver is ready, and that notice waits behind all bytes that the receiver sends on the same connection.
        """
        ready = deque(steps)
        while ready:
            step = ready.popleft()
            part, received = running.data[step.begin : step.end], None
            if not part.numel():
                ready += running.end(step, None)
                continue
            peer, tag = step.lane.peer, _FIRST + step.number
            if step.lane.sends:
                work = self._group.send([part], peer, tag)
            else:
                received = torch.empty_like(part) if step.lane.adds else None
                work = self._group.recv([part if received is None else received], peer, tag)
            self._lane(step.lane).put((running, step, work, received))

    def _lane(self, lane: _Lane) -> "SimpleQueue[_Work | None]":
        with self._lock:
            if lane not in self._lanes:
                self._lanes[lane] = SimpleQueue()
                self._start(f"ringtap {'to' if lane.sends else 'from'} {lane.peer}", self._end_messages, lane)
            return self._lanes[lane]

    def _end_messages(self, lane: _Lane) -> None:
        """Wait for the messages of a lane, one after the other, and begin those that wait for them."""
        while (begun := self._lanes[lane].get()) is not None:
            running, step, work, received = begun
            try:
                work.wait()
                self._begin(running, running.end(step, received))
            except Exception as error:
                running.fail(error)


def exchange_gradients(model: Any, collective: str, *, group: int = 1, shards: int = 1, pieces: int = 1) -> None:
    """Let a model exchange its gradients by a message graph, instead of the all-reduce of its process group.

    The gradients are averaged, as without it. Call it on every worker, before the first iteration.

    Args:
        model: a ``torch.nn.parallel.DistributedDataParallel`` of the default process group.
        collective: algorithm of all-reduce, such as ``double-tree``.
        group: workers per node, for ``hierarchical``.
        shards: parameter servers, which must be started beside the job.
        pieces: pieces in which trees and switches pass data on.

    Raises:
        UsageError: the algorithm is unknown, or does not go with the number of workers or with the model.
    """
    numbers = {"group": str(group), "shards": str(shards), "pieces": str(pieces)}
    found = algorithms(argparse.Namespace(collective=collective, **numbers))
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise UsageError(f"{collective} cannot exchange the gradients of a model on {device}: only those on CPUs")
    if model.process_group is not dist.distributed_c10d._get_default_group():
        raise UsageError(f"{collective} cannot exchange the gradients of a model with a process group of its own")
    if found.key not in _exchanges:
        store = dist.distributed_c10d._get_default_store()
        _exchanges[found.key] = GradientExchange(store, dist.get_rank(), dist.get_world_size(), found)
    model.register_comm_hook(_exchanges[found.key], _average)


def _average(state: GradientExchange, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.begin(bucket.buffer().div_(dist.get_world_size()))


def main() -> int:
    """Run a parameter server or a switch that adds, until the job ends."""
    parser = argparse.ArgumentParser(description="A parameter server or a switch that adds, beside a job.")
    add_algorithms(parser)
    parser.add_argument("--workers", required=True, metavar="N", help="number of workers")
    parser.add_argument("--number", default="0", metavar="K", help="number of this one (0)")
    options = parser.parse_args()
    found, workers, number = (
        algorithms(options), whole_number(options.workers, "--workers"), whole_number(options.number, "--number")
    )  # fmt: skip
    if not 0 <= number < found.others:
        raise UsageError(
            f"--number {number}: {options.collective} has {counted(found.others, 'server')} beside workers"
        )
    try:
        host, port = os.environ["MASTER_ADDR"], whole_number(os.environ["MASTER_PORT"], "MASTER_PORT")
    except KeyError as error:
        raise UsageError(f"{error.args[0]} is not set: set it as for the workers of the job") from error
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=_JOIN_TIMEOUT)
    except RuntimeError as error:
        raise UsageError(f"no job answers at {host} port {port} within {_JOIN_TIMEOUT}") from error
    GradientExchange(store, workers + number, workers, found).serve()
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
