"""The order in which the exchange of gradients runs a message graph, on a network that holds one message back."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import pytest

from ringtap.workload.execution_trace import Collective
from ringtap.workload.lowering import Algorithms
from ringtap.workload.message_graph import MessageGraph

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

if TYPE_CHECKING:
    import torch

ELEMENTS = 240
# halves of the data go up and down two trees at once, and both use the same two workers in one direction
CASES = [
    (Algorithms("double-tree", pieces=3), 4), (Algorithms("double-tree", pieces=2), 5),
    (Algorithms("tree", pieces=3), 5), (Algorithms("ring"), 4), (Algorithms("halving-doubling"), 8),
    (Algorithms("hierarchical", group=3), 6), (Algorithms("parameter-server", shards=2), 3),
    (Algorithms("in-network", pieces=3), 3),
]  # fmt: skip


class Work(threading.Event):
    """One side of a message."""

    _is_lost = False

    def lose(self) -> None:
        self._is_lost = True
        self.set()

    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        if self._is_lost:
            raise RuntimeError("the other side has ended")
        return True


class Network:
    """Messages of all endpoints, which end when both sides have begun them, but for the one that is held."""

    def __init__(self, held: int) -> None:
        self._lock, self._held, self._is_closed = threading.Lock(), held, False
        self._begun: dict[tuple[int, int, int], dict[bool, tuple[torch.Tensor, Work]]] = defaultdict(dict)
        self.received, self.ended = set[int](), set[int]()  # messages whose receivers have begun, and that have ended

    def begin(self, source: int, destination: int, tag: int, data: torch.Tensor, *, sends: bool) -> Work:
        work = Work()
        with self._lock:
            if tag and not sends:  # the tag of sizes is 0
                self.received.add(tag - 1)
            self._begun[source, destination, tag][sends] = data, work
            self._end(source, destination, tag)
            if self._is_closed:
                work.lose()
        return work

    def release(self) -> None:
        with self._lock:
            tag, self._held = self._held + 1, -1
            for key in [key for key in self._begun if key[2] == tag]:
                self._end(*key)

    def close(self) -> None:
        """End the servers' wait for the size of further data."""
        with self._lock:
            self._is_closed = True
            for both in self._begun.values():
                for _, work in both.values():
                    work.lose()

    def _end(self, source: int, destination: int, tag: int) -> None:
        both = self._begun[source, destination, tag]
        if len(both) == 2 and tag != self._held + 1:
            del self._begun[source, destination, tag]
            both[False][0].copy_(both[True][0])
            self.ended |= {tag - 1} if tag else set()
            both[True][1].set()
            both[False][1].set()


class Group:
    """The methods of a process group that `GradientExchange` calls."""

    def __init__(self, network: Network, endpoint: int) -> None:
        self._network, self._endpoint = network, endpoint

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._network.begin(self._endpoint, peer, tag, tensors[0], sends=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return self._network.begin(peer, self._endpoint, tag, tensors[0], sends=False)


def waiting(graph: MessageGraph, held: int) -> set[int]:
    """Return a message and all those that wait for it."""
    found = {held}
    for message in range(len(graph)):
        if found & set(graph.waits_for(message).tolist()):
            found.add(message)
    return found


def received_first(graph: MessageGraph) -> set[int]:
    """Return the messages whose receivers need not wait: the sender has a part in all that they wait for."""
    return {
        message
        for message in range(len(graph))
        if all(graph.source[message] in (graph.source[before], graph.destination[before])
               for before in graph.waits_for(message))
    }  # fmt: skip


@pytest.mark.parametrize(("algorithms", "workers"), CASES, ids=lambda each: getattr(each, "key", None))
def test_only_what_waits_for_a_message_that_is_late_is_late(
    algorithms: Algorithms, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in the worker that runs this, and not in all that collect it
    import torch
    from torch import distributed as dist

    from ringtap.workload.ddp_message_graph_exchange import GradientExchange

    graph = algorithms.graph(Collective.ALL_REDUCE, workers, ELEMENTS)
    for held in range(0, len(graph), max(1, len(graph) // 4)):
        network = Network(held)
        monkeypatch.setattr(
            dist, "ProcessGroupGloo", lambda _, endpoint, *__, network=network: Group(network, endpoint)
        )
        ends = [
            GradientExchange(dist.HashStore(), end, workers, algorithms) for end in range(workers + algorithms.others)
        ]
        for server in ends[workers:]:
            threading.Thread(target=server.serve, daemon=True).start()
        data = [torch.arange(float(ELEMENTS)) + rank for rank in range(workers)]
        futures = [end.begin(each) for end, each in zip(ends, data, strict=False)]
        expected, first = set(range(len(graph))) - waiting(graph, held), received_first(graph)
        until_s = time.monotonic() + 30  # a machine that does not run these threads for so long fails the test
        while not (network.ended >= expected and network.received >= first) and time.monotonic() < until_s:
            time.sleep(0.001)
        assert network.ended == expected, f"message {held} is held back"
        assert network.received >= first
        network.release()
        for future, rank in zip(futures, range(workers), strict=True):
            assert torch.equal(future.wait(), torch.arange(float(ELEMENTS)) * workers + sum(range(workers))), rank
        network.close()
        for end in ends:
            end._close()
