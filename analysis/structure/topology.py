"""Infers the topology of the exchange of gradients (ring, star, tree, all to all) from the bytes between hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ringtap.analysis.structure.closed_form_patterns import (
    ALL_TO_ALL,
    PAIR,
    PIPELINE,
    RING,
    SHARDED,
    STAR,
    TOLERANCE,
    TREE,
    TWO_WAY_RING,
    Placement,
    best_fits,
)
from ringtap.core.units import listed

IRREGULAR = "irregular"
RING_MEMBER, ONE_PEER, SEVERAL_PEERS, ONE_HOST = "member of a ring", "one peer", "several peers", "one host"
ONE_DIRECTION = "one direction"

Edges = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class ExchangeTopology:
    """Topology of an exchange.

    Attributes:
        name: one of the constants of this module or of `patterns`.
        hosts: hosts that take part and were captured; in a ring, each sends to the next one; in a pipeline, the stages
            in order; servers and the root of a tree come first, and the hosts of a group follow its first one.
        servers: parameter servers, or the switch that adds; none for other topologies.
        root: root of a tree; None if not known, and for other topologies.
        group: hosts of each group of a hierarchy, the first of which exchanges with other groups; 0 without groups.
        whole: True if all exchanges between these hosts were captured.
        workers: number of workers, one per host; None if not known.
        sent_per_byte: bytes that a worker sends for each byte of gradients, mean of the workers; None if not known.
        evidence: the bytes and times from which the name follows, as a clause; empty if there is no name.
        error: largest difference of the bytes between two hosts from those of the pattern, as a share; None if the
            pattern does not say how many bytes they are.
        unseen: a sentence about facts that the captures cannot show; empty if there are none.
    """

    name: str
    hosts: tuple[str, ...]
    servers: tuple[str, ...] = ()
    root: str | None = None
    group: int = 0
    whole: bool = True
    workers: int | None = None
    sent_per_byte: float | None = None
    evidence: str = ""
    error: float | None = None
    unseen: str = ""


def shape_of(edges: Edges, only_host: str | None = None, leading: Collection[tuple[str, str]] = ()) -> ExchangeTopology:
    """Determine the topology of some exchanges.

    Args:
        edges: bytes per iteration by (sender, receiver), without control traffic.
        only_host: the host at which all packets were captured; None: every exchange between the hosts was captured.
        leading: the (sender, receiver) whose bytes come before those in the other direction, in most iterations.
    """
    hosts = tuple(sorted({host for pair in edges for host in pair}))
    if len(hosts) == 1:
        return ExchangeTopology(
            ONE_HOST, hosts, whole=False, unseen="all ranks share one address, so who sends to whom is not observable"
        )
    if only_host is not None:
        return _from_one_host(edges, only_host)
    numbers = {host: number for number, host in enumerate(hosts)}
    observed = np.zeros((len(hosts), len(hosts)))
    for (source, destination), volume in edges.items():
        observed[numbers[source], numbers[destination]] = volume
    for fit in best_fits(observed):
        if (found := _fitted(fit, hosts, leading)) is not None:
            return found
    links = {frozenset(pair) for pair in edges}
    mutual = all((b, a) in edges for a, b in edges)
    if mutual and len(links) == len(hosts) - 1 and _connected(links, hosts):
        return _acyclic(edges, hosts, leading)
    return ExchangeTopology(IRREGULAR, hosts)


def _fitted(fit: Placement, hosts: tuple[str, ...], leading: Collection[tuple[str, str]]) -> ExchangeTopology | None:
    """Return the topology of hosts placed in a form; None if the times contradict it."""
    form = fit.form
    order = tuple(hosts[number] for number in fit.order)
    servers, workers = order[: form.servers], order[form.servers :]
    unseen = _LOOKS_LIKE.get((form.name, len(hosts)), _LOOKS_LIKE.get((form.name, 0), ""))
    if form.name == SHARDED:
        if _all_lead(servers, workers, leading):
            servers, workers = workers, servers
        elif not _all_lead(workers, servers, leading):
            if len(hosts) == 4:
                return None  # a ring in both directions
            if len(servers) == len(workers):
                unseen = "the halves look the same, so which one has the servers is not observable"
    sent = form.matrix[form.servers :].sum() / len(workers)
    return ExchangeTopology(
        form.name, (*servers, *workers), servers, None, form.group, True, len(workers), float(sent), form.evidence,
        fit.error, unseen,
    )  # fmt: skip


# patterns that look the same, by name and number of hosts; 0: any number
_LOOKS_LIKE = {
    (PAIR, 2): "with two hosts, all algorithms of all-reduce look the same",
    (RING, 0): "an all-gather and a reduce-scatter around the ring, as in FSDP, look the same",
    (ALL_TO_ALL, 3): "a ring in both directions looks the same with three hosts",
    (ALL_TO_ALL, 0): "parameter servers on the workers' hosts look the same",
    (TWO_WAY_RING, 0): "an all-gather around the ring one way and a reduce-scatter the other way look the same",
}


def _all_lead(senders: Iterable[str], receivers: Collection[str], leading: Collection[tuple[str, str]]) -> bool:
    return all((sender, receiver) in leading for sender in senders for receiver in receivers)


def _acyclic(edges: Edges, hosts: tuple[str, ...], leading: Collection[tuple[str, str]]) -> ExchangeTopology:
    """Return the topology of hosts with one link fewer than there are hosts: a star, a tree or a pipeline."""
    peers = {host: sorted(b for a, b in edges if a == host) for host in hosts}
    if (stages := _stages(peers, leading)) is not None:
        evidence = "each stage sends to the next one, and later as often back, in a chain"
        return ExchangeTopology(PIPELINE, stages, workers=len(hosts), evidence=evidence)
    mean = sum(edges.values()) / len(edges)
    error = max(abs(volume / mean - 1) for volume in edges.values())
    if error > TOLERANCE:
        return ExchangeTopology(IRREGULAR, hosts)
    hub = max(hosts, key=lambda host: len(peers[host]))
    if len(peers[hub]) == len(hosts) - 1:
        others = tuple(peers[hub])
        unseen = f"a tree of {hub} and two leaves looks the same" if len(hosts) == 3 else ""
        evidence = "each worker sends all gradients to one host and gets as many bytes back"
        return ExchangeTopology(
            STAR, (hub, *others), (hub,), workers=len(others), sent_per_byte=1.0, evidence=evidence, error=error,
            unseen=unseen,
        )  # fmt: skip
    upward = {host: [peer for peer in peers[host] if (host, peer) in leading] for host in hosts}
    tops = [host for host in hosts if not upward[host]]
    known = len(tops) == 1 and all(len(above) == 1 for host, above in upward.items() if host != tops[0])
    root = tops[0] if known else None
    chain = all(len(each) < 3 for each in peers.values()) and not known
    return ExchangeTopology(
        TREE, hosts if root is None else (root, *(host for host in hosts if host != root)), root=root,
        workers=len(hosts), sent_per_byte=2 * (len(hosts) - 1) / len(hosts),
        evidence="all gradients pass each link of a tree in both directions", error=error,
        unseen="a pipeline of stages in a chain looks the same" if chain else "",
    )  # fmt: skip


def _stages(peers: Mapping[str, list[str]], leading: Collection[tuple[str, str]]) -> tuple[str, ...] | None:
    """Return the hosts of a chain in the order in which they begin to send; None if it is no such chain."""
    ends = [host for host, each in peers.items() if len(each) == 1]
    if len(ends) != 2:
        return None
    for first in ends:
        order = [first]
        while following := [peer for peer in peers[order[-1]] if peer not in order and (order[-1], peer) in leading]:
            order += following
        if len(order) == len(peers):
            return tuple(order)
    return None


def _connected(links: Iterable[frozenset[str]], hosts: tuple[str, ...]) -> bool:
    reached = {hosts[0]}
    left = [link for link in links if len(link) == 2]
    while grown := [link for link in left if link & reached and link - reached]:
        reached.update(*grown)
    return reached == set(hosts)


def _from_one_host(edges: Edges, host: str) -> ExchangeTopology:
    """Determine the topology as far as the packets of one host show it."""
    sends = sorted(b for a, b in edges if a == host)
    receives = sorted(a for a, b in edges if b == host)
    hosts = (host, *sorted({*sends, *receives} - {host}))
    elsewhere = f"only packets of {host} were captured"
    if not sends or not receives:
        side = f"sends to {listed(sends)}" if sends else f"receives from {listed(receives)}"
        text = f"{elsewhere}, and of these one direction: {host} {side}; the rest of the pattern is not observable"
        return ExchangeTopology(ONE_DIRECTION, hosts, whole=False, unseen=text)
    if len(sends) == 1 == len(receives) and sends != receives:
        before, after = receives[0], sends[0]
        text = (
            f"{elsewhere}: {before} sends to {host} and {host} to {after}, as in a ring of three or more; how many "
            "hosts lie between the neighbours, and in what order, is not observable"
        )
        return ExchangeTopology(RING_MEMBER, (before, host, after), whole=False, unseen=text)
    if sends == receives and len(sends) == 1:
        text = (
            f"{elsewhere}: it exchanges with {sends[0]} alone. A pair, a worker of a parameter server, a leaf of a "
            "tree and an end of a pipeline look the same from here"
        )
        return ExchangeTopology(ONE_PEER, hosts, whole=False, unseen=text)
    text = (
        f"{elsewhere}: it exchanges with {listed(hosts[1:])}. The middle of a star, an inner node of a tree, all to all"
        f"{' and a ring in both directions' if len(hosts) == 3 else ''} look the same from here"
    )
    return ExchangeTopology(SEVERAL_PEERS, hosts, whole=False, unseen=text)
