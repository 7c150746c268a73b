"""Topology of the exchange of gradients (ring, star, tree, all to all), inferred from the bytes between hosts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# edges whose volumes differ by no more than this share count as equal
_EQUAL = 0.1

RING, TWO_WAY_RING, PAIR, STAR, TREE = "ring", "ring in both directions", "pair", "star", "tree"
ALL_TO_ALL, HALVING, IRREGULAR = "all-to-all", "recursive halving and doubling", "irregular"
RING_MEMBER, ONE_PEER, SEVERAL_PEERS, ONE_HOST = "member of a ring", "one peer", "several peers", "one host"
ONE_DIRECTION = "one direction"

Edges = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Topology:
    """Topology of an exchange.

    Attributes:
        name: one of the constants of this module.
        hosts: hosts that take part and were captured; in a ring, each sends to the next one.
        hub: the host in the middle of a star; None for other topologies.
        whole: True if all exchanges between these hosts were captured.
        workers: number of workers, one per host; None if not known.
        unseen: a sentence about facts that the captures cannot show; empty if there are none.
        spread: difference of the largest and smallest edge over the largest; None for fewer than two edges.
    """

    name: str
    hosts: tuple[str, ...]
    hub: str | None
    whole: bool
    workers: int | None
    unseen: str
    spread: float | None


def shape_of(edges: Edges, only_host: str | None = None) -> Topology:
    """Determine the topology of some exchanges.

    Args:
        edges: bytes per iteration by (sender, receiver), without control traffic.
        only_host: the host at which all packets were captured; None: every exchange between the hosts was captured.
    """
    hosts = _hosts(edges)
    values = list(edges.values())
    spread = (max(values) - min(values)) / max(values) if len(values) > 1 else None
    if len(hosts) == 1:
        text = "all ranks share one address, so who sends to whom is not observable"
        return Topology(ONE_HOST, hosts, None, False, None, text, spread)
    if only_host is not None and len(hosts) > 1:
        return _from_one_host(edges, only_host, spread)
    name, order, hub, text = _name(edges, hosts)
    # the server of a star is not a worker
    workers = len(hosts) - 1 if name == STAR else len(hosts)
    return Topology(name, order, hub, True, None if name == IRREGULAR else workers, text, spread)


def _hosts(edges: Edges) -> tuple[str, ...]:
    return tuple(sorted({host for pair in edges for host in pair}))


def _name(edges: Edges, hosts: tuple[str, ...]) -> tuple[str, tuple[str, ...], str | None, str]:
    """Return the name, the hosts in order, the hub, and a sentence about topologies that look the same."""
    out = {host: [b for a, b in edges if a == host] for host in hosts}
    into = {host: [a for a, b in edges if b == host] for host in hosts}
    mutual = all((b, a) in edges for a, b in edges)
    links = {frozenset(pair) for pair in edges}
    if all(len(out[host]) == 1 == len(into[host]) for host in hosts):
        order = _walk({host: out[host][0] for host in hosts}, hosts[0])
        name = IRREGULAR if len(order) < len(hosts) else PAIR if len(hosts) == 2 else RING
        return name, order if name == RING else hosts, None, ""
    if mutual and _connected(links, hosts):
        if len(links) == len(hosts) - 1:
            return _star_or_tree(out, hosts)
        if all(len(out[host]) == 2 for host in hosts):
            return _cycle(edges, out, hosts)
        if len(links) == len(hosts) * (len(hosts) - 1) // 2 and _equal(edges.values()):
            return ALL_TO_ALL, hosts, None, ""
        if _halves(edges, out, hosts):
            return HALVING, hosts, None, ""
    return IRREGULAR, hosts, None, ""


def _star_or_tree(out: Mapping[str, list[str]], hosts: tuple[str, ...]) -> tuple[str, tuple[str, ...], str | None, str]:
    hub = max(hosts, key=lambda host: len(out[host]))
    if len(out[hub]) < len(hosts) - 1:
        return TREE, hosts, None, ""
    text = f"a tree of {hub} and two leaves looks the same" if len(hosts) == 3 else ""
    return STAR, (hub, *(host for host in hosts if host != hub)), hub, text


def _cycle(
    edges: Edges, out: Mapping[str, list[str]], hosts: tuple[str, ...]
) -> tuple[str, tuple[str, ...], str | None, str]:
    """Return the same as `_name` for hosts that each exchange with two others in both directions."""
    if not _equal(edges.values()):
        return (HALVING if _halves(edges, out, hosts) else IRREGULAR), hosts, None, ""
    if len(hosts) == 3:
        return ALL_TO_ALL, hosts, None, "a ring in both directions looks the same with three hosts"
    order = [hosts[0]]
    while len(order) < len(hosts):
        order.append(next(host for host in out[order[-1]] if host not in order))
    return TWO_WAY_RING, tuple(order), None, ""


def _walk(following: Mapping[str, str], first: str) -> tuple[str, ...]:
    order = [first]
    while following[order[-1]] not in order:
        order.append(following[order[-1]])
    return tuple(order)


def _connected(links: Iterable[frozenset[str]], hosts: tuple[str, ...]) -> bool:
    reached = {hosts[0]}
    left = [link for link in links if len(link) == 2]
    while grown := [link for link in left if link & reached and link - reached]:
        reached.update(*grown)
    return reached == set(hosts)


def _equal(values: Iterable[float]) -> bool:
    known = list(values)
    return max(known) - min(known) <= _EQUAL * max(known)


def _halves(edges: Edges, out: Mapping[str, list[str]], hosts: tuple[str, ...]) -> bool:
    """True if each host has log2(N) partners, each with half the bytes of the one before."""
    steps = len(hosts).bit_length() - 1
    if len(hosts) != 1 << steps:
        return False
    for host in hosts:
        volumes = sorted((edges[host, peer] for peer in out[host]), reverse=True)
        wanted = [volumes[0] / 2**step for step in range(steps)]
        if len(volumes) != steps or any(abs(a - b) > _EQUAL * b for a, b in zip(volumes, wanted, strict=True)):
            return False
    return True


def _from_one_host(edges: Edges, host: str, spread: float | None) -> Topology:
    """Determine the topology as far as the packets of one host show it."""
    sends = sorted(b for a, b in edges if a == host)
    receives = sorted(a for a, b in edges if b == host)
    hosts = (host, *sorted({*sends, *receives} - {host}))
    elsewhere = f"only packets of {host} were captured"
    if not sends or not receives:
        side = f"sends to {_and(sends)}" if sends else f"receives from {_and(receives)}"
        text = f"{elsewhere}, and of these one direction: {host} {side}; the rest of the pattern is not observable"
        return Topology(ONE_DIRECTION, hosts, None, False, None, text, spread)
    if len(sends) == 1 == len(receives) and sends != receives:
        before, after = receives[0], sends[0]
        text = (
            f"{elsewhere}: {before} sends to {host} and {host} to {after}, as in a ring of three or more; how many "
            "hosts lie between the neighbours, and in what order, is not observable"
        )
        return Topology(RING_MEMBER, (before, host, after), None, False, None, text, spread)
    if sends == receives and len(sends) == 1:
        text = (
            f"{elsewhere}: it exchanges with {sends[0]} alone. A pair, a worker of a parameter server and a leaf of a "
            "tree look the same from here"
        )
        return Topology(ONE_PEER, hosts, None, False, None, text, spread)
    text = (
        f"{elsewhere}: it exchanges with {_and(hosts[1:])}. The middle of a star, an inner node of a tree, all to all"
        f"{' and a ring in both directions' if len(hosts) == 3 else ''} look the same from here"
    )
    return Topology(SEVERAL_PEERS, hosts, None, False, None, text, spread)


def _and(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
