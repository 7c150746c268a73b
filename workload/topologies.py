"""Describes topologies: hosts, switches, links with their rates, and the links between each pair of hosts.

Links are directed. A switch has no limit of its own. Of several shortest paths, a pair of hosts has one in a
simulation. The testbed builds the same links and gives each flow one of the shortest paths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.testbed_options import SWITCH

Path = Sequence[int]


class Dimension(NamedTuple):
    """One dimension of a topology: hosts that differ in one coordinate only.

    Attributes:
        switch: True if a switch is between them, False if they are a ring.
        size: number of hosts.
        rate_bps: rate of each host's links in this dimension.
    """

    switch: bool
    size: int
    rate_bps: float


@dataclass(frozen=True)
class Topology:
    """Hosts and directed links.

    Attributes:
        name: kind and size.
        hosts: number of hosts.
        links: name of each link.
        ends: nodes from which and to which each link leads; hosts are ``h0``, ``h1``, …, the others are switches.
        rate_bps: rate of each link in bit/s.
        path: function from two hosts to the numbers of the links between them, in order.
        dimensions: switches and rings whose product the topology is, the one between neighbouring hosts first; none
            if it is no such product.
    """

    name: str
    hosts: int
    links: tuple[str, ...]
    ends: tuple[tuple[str, str], ...]
    rate_bps: tuple[float, ...]
    path: Callable[[int, int], Path]
    dimensions: tuple[Dimension, ...] = ()

    @property
    def bundles(self) -> tuple[str, ...]:
        """Name of each link's bundle: links over which flows with several shortest paths are spread.

        A host's link is a bundle of its own, as are the links of a leaf, an edge switch or a pod in one direction. In
        a ring and a torus, all links are one bundle.
        """
        if self.name in ("ring", "torus"):
            return ("all",) * len(self.links)
        return tuple(f"{words[0]} {words[-1]}" for words in map(str.split, self.links))


def with_host_at(topology: Topology, switch: str) -> Topology:
    """Return a topology with one host more, which is a process at a switch and has no link of its own."""
    added = topology.hosts

    def path(a: int, b: int) -> Path:
        if added not in (a, b):
            return topology.path(a, b)
        source, target = (switch if host == added else f"h{host}" for host in (a, b))
        ways: dict[str, tuple[int, ...]] = {source: ()}
        for node in (waiting := [source]):
            for link, (begin, end) in enumerate(topology.ends):
                if begin == node and end not in ways:
                    ways[end] = (*ways[node], link)
                    waiting.append(end)
        return ways[target]

    return replace(topology, hosts=added + 1, path=path, dimensions=())


def star(hosts: int, rate_bps: float) -> Topology:
    """Hosts around one switch; links 0 to hosts - 1 lead to the switch, the others from it."""
    links, ends = _host_links([SWITCH] * hosts)
    return Topology(
        "star", hosts, tuple(links), tuple(ends), (float(rate_bps),) * len(links), lambda a, b: (a, hosts + b),
        (Dimension(True, hosts, rate_bps),),
    )  # fmt: skip


def _host_links(switches: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return names and ends of the links between each host and its switch: those up, then those down."""
    hosts = range(len(switches))
    ends = [(f"h{host}", switches[host]) for host in hosts]
    return [f"h{host} {way}" for way in ("up", "down") for host in hosts], [*ends, *map(_back, ends)]


def _back(ends: tuple[str, str]) -> tuple[str, str]:
    """Return the ends of the link in the other direction."""
    return ends[1], ends[0]


def leaf_spine(hosts: int, rate_bps: float, per_leaf: int, oversubscription: float = 1.0, spines: int = 1) -> Topology:
    """Leaf switches with some hosts each, all of them linked to all spine switches.

    Args:
        hosts: number of hosts; the last leaf may have fewer than the others.
        rate_bps: rate of the hosts' links.
        per_leaf: hosts of a leaf.
        oversubscription: rate of a full leaf's hosts over that of its links to the spines.
        spines: number of spines.
    """
    leaves = -(-hosts // per_leaf)
    uplink_bps = per_leaf * rate_bps / oversubscription / spines
    links, ends = _host_links([f"leaf{host // per_leaf}" for host in range(hosts)])
    first = len(links)
    uplinks = [(f"leaf{leaf}", f"spine{spine}") for leaf in range(leaves) for spine in range(spines)]
    links += [f"{leaf} {spine} {way}" for way in ("up", "down") for leaf, spine in uplinks]
    ends += [*uplinks, *map(_back, uplinks)]

    def path(a: int, b: int) -> Path:
        above, below = a // per_leaf, b // per_leaf
        if above == below:
            return (a, hosts + b)
        spine = _choice(a, b, spines)
        return (a, first + above * spines + spine, first + (leaves + below) * spines + spine, hosts + b)

    rates = (float(rate_bps),) * first + (uplink_bps,) * (len(links) - first)
    dimensions = (Dimension(True, per_leaf, rate_bps), Dimension(True, leaves, rate_bps / oversubscription))
    is_product = spines == 1 and hosts == leaves * per_leaf
    return Topology("leaf-spine", hosts, tuple(links), tuple(ends), rates, path, dimensions if is_product else ())


def _choice(a: int, b: int, paths: int) -> int:
    """Return the number of the path that a pair of hosts has."""
    return (a * 2654435761 + b) % paths


def ring(hosts: int, rate_bps: float) -> Topology:
    """Hosts in a ring, each with a link to both neighbours; data take the shorter way."""
    return torus((hosts,), rate_bps)


def torus(sides: Sequence[int], rate_bps: float) -> Topology:
    """Hosts in a torus with sides of some lengths; data go along the first dimension first, the shorter way round."""
    hosts = math.prod(sides)
    steps = [math.prod(sides[dimension + 1 :]) for dimension in range(len(sides))]
    links, ends = [], []
    for host in range(hosts):
        for dimension, (side, step) in enumerate(zip(sides, steps, strict=True)):
            place = host // step % side
            for sign, way in (("+", 1), ("-", -1)):
                links.append(f"h{host} dim{dimension} {sign}")
                ends.append((f"h{host}", f"h{host + ((place + way) % side - place) * step}"))

    def path(a: int, b: int) -> Path:
        found, at = [], a
        for dimension, (side, step) in enumerate(zip(sides, steps, strict=True)):
            place, goal = at // step % side, b // step % side
            ahead = (goal - place) % side
            forward = ahead <= side - ahead
            for _ in range(min(ahead, side - ahead)):
                found.append((at * len(sides) + dimension) * 2 + (not forward))
                place = at // step % side
                at += ((place + (1 if forward else -1)) % side - place) * step
        return found

    return Topology(
        "torus" if len(sides) > 1 else "ring", hosts, tuple(links), tuple(ends), (float(rate_bps),) * len(links), path,
        tuple(Dimension(False, side, rate_bps) for side in reversed(sides)),
    )  # fmt: skip


def fat_tree(ports: int, rate_bps: float) -> Topology:
    """A fat tree of switches with k ports (Al-Fares et al., SIGCOMM 2008): k³/4 hosts, and all links alike.

    Raises:
        UsageError: the number of ports is odd.
    """
    if ports % 2 or ports < 2:
        raise UsageError(f"a fat tree needs switches with an even number of ports, not {ports}")
    half = ports // 2
    hosts = ports * half * half
    edges = ports * half  # as many aggregation switches
    links, ends = _host_links([f"edge{host // half}" for host in range(hosts)])
    lower = len(links)
    links += [f"edge{e} agg{a} {way}" for way in ("up", "down") for e in range(edges) for a in range(half)]
    below = [(f"edge{e}", f"agg{e // half * half + a}") for e in range(edges) for a in range(half)]
    upper = len(links)
    links += [
        f"pod{p} agg{a} core{c} {way}"
        for way in ("up", "down")
        for p in range(ports)
        for a in range(half)
        for c in range(half)
    ]
    top = [(f"agg{agg}", f"core{agg % half * half + c}") for agg in range(edges) for c in range(half)]
    ends += [*below, *map(_back, below), *top, *map(_back, top)]
    between, above = edges * half, ports * half * half

    def path(a: int, b: int) -> Path:
        edge_a, edge_b = a // half, b // half
        if edge_a == edge_b:
            return (a, hosts + b)
        aggregate, core = divmod(_choice(a, b, half * half), half)
        up, down = lower + edge_a * half + aggregate, lower + between + edge_b * half + aggregate
        pod_a, pod_b = edge_a // half, edge_b // half
        if pod_a == pod_b:
            return (a, up, down, hosts + b)
        rise = upper + (pod_a * half + aggregate) * half + core
        fall = upper + above + (pod_b * half + aggregate) * half + core
        return (a, up, rise, fall, down, hosts + b)

    return Topology("fat-tree", hosts, tuple(links), tuple(ends), (float(rate_bps),) * len(links), path)
