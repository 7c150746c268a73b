"""Calculates an iteration from its message graphs: bytes on each link, its time, and the critical path by link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringtap.workload.execution_trace import NodeType
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.simulate_iterations import critical_nodes, simulate
from ringtap.workload.topologies import Topology
from ringtap.workload.workload import Workload, check_workload, messages_of, peer_of, size_of

# gloo/transport/tcp/pair.h: a message has such a header, as have the sender's and the receiver's notices before it
_GLOO_HEADER_BYTES = 48


@dataclass(frozen=True)
class ExpectedIteration:
    """An iteration without cross traffic.

    Attributes:
        iteration_s: its simulated time.
        first_message_s: time of it in which nobody sends.
        compute_s: computation on the critical path.
        sending_s: bundle of links -> time of the messages on the critical path that it limits.
        latency_s: time of these messages beside their transmission.
        critical_messages: number of these messages.
        payload_bytes: bundle of links -> bytes of the messages over it; 0 if there are none.
        header_bytes: bundle of links -> bytes of gloo's headers over it, which TCP carries as payload, too.
    """

    iteration_s: float
    first_message_s: float
    compute_s: float
    sending_s: dict[str, float]
    latency_s: float
    critical_messages: int
    payload_bytes: dict[str, int]
    header_bytes: dict[str, int]


def expected_iteration(
    workload: Workload,
    topology: Topology,
    algorithms: Algorithms,
    places: Sequence[int],
    *,
    latency_s: float = 0.0,
    payload_share: float = 1.0,
) -> ExpectedIteration:
    """Lower an iteration to its messages, place them on links, and simulate them.

    A message on the critical path counts to the bundle of its way whose links take longest for all their bytes of the
    iteration.

    Args:
        workload: what ranks compute and sum up.
        topology: hosts and links.
        algorithms: the algorithm of all-reduce.
        places: host of each rank, server and switch that adds.
        latency_s: time that each message takes beside its transmission.
        payload_share: payload of a full frame over its bytes, by which the links' rates are counted.

    Raises:
        UsageError: the iteration cannot be simulated.
    """
    messages = lower(workload, algorithms)
    check_workload(messages)  # puts the nodes of each rank in order
    simulated = simulate(
        messages, topology, Algorithms(), latency_s=latency_s, rate_share=payload_share, places=places
    )  # fmt: skip
    busy_s = simulated.link_bytes * 8 / (np.asarray(topology.rate_bps) * payload_share)
    payload_bytes, header_bytes = dict.fromkeys(topology.bundles, 0), dict.fromkeys(topology.bundles, 0)
    for (source, destination, _), sent in messages_of(messages)[0].items():
        for link in topology.path(places[source], places[destination]):
            payload_bytes[topology.bundles[link]] += sum(size_of(node) for _, node in sent)
            header_bytes[topology.bundles[link]] += 2 * _GLOO_HEADER_BYTES * len(sent)
        for link in topology.path(places[destination], places[source]):
            header_bytes[topology.bundles[link]] += _GLOO_HEADER_BYTES * len(sent)
    compute_s = waiting_s = 0.0
    critical_messages = 0
    sending_s = defaultdict[str, float](float)
    for rank, node, seconds in critical_nodes(messages, simulated):
        if node.type == NodeType.COMP:
            compute_s += seconds
            continue
        critical_messages += 1
        path = topology.path(places[rank], places[peer_of(node)])
        if node.type == NodeType.COMM_RECV:
            path = topology.path(places[peer_of(node)], places[rank])
        waiting_s += min(latency_s, seconds)
        if path:
            limit = topology.bundles[max(path, key=lambda link: busy_s[link])]
            sending_s[limit] += seconds - min(latency_s, seconds)
    spans = [span for trace in simulated.spans for span in trace]
    first_s = min((span.begin_s for span in spans if span.node.type == NodeType.COMM_SEND), default=0.0)
    return ExpectedIteration(
        simulated.iteration_s,
        first_s,
        compute_s,
        dict(sending_s),
        waiting_s,
        critical_messages,
        payload_bytes,
        header_bytes,
    )
