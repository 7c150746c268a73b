"""Topologies: hosts, links with their rates, and the links between each pair of hosts.

Links are directed. A switch has no limit of its own. Of several shortest paths, a pair of hosts has one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringtap.errors import UsageError

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
        rate_bps: rate of each link in bit/s, shape (links,).
        path: function from two hosts to the numbers of the links between them, in order.
        dimensions: switches and rings whose product the topology is, the one between neighbouring hosts first; none
            if it is no such product.
    """

    name: str
    hosts: int
    links: tuple[str, ...]
    rate_bps: npt.NDArray[np.float64]
    path: Callable[[int, int], Path]
    dimensions: tuple[Dimension, ...] = ()


def star(hosts: int, rate_bps: float) -> Topology:
    """Hosts around one switch; links 0 to hosts - 1 lead to the switch, the others from it."""
    links = [f"h{host} up" for host in range(hosts)] + [f"h{host} down" for host in range(hosts)]
    return Topology(
        "star", hosts, tuple(links), np.full(2 * hosts, float(rate_bps)), lambda a, b: (a, hosts + b),
        (Dimension(True, hosts, rate_bps),),
    )  # fmt: skip


def two_tier(hosts: int, rate_bps: float, per_leaf: int, oversubscription: float = 1.0) -> Topology:
    """Leaf switches with some hosts each, around one core; leaves are oversubscribed."""
    leaves = -(-hosts // per_leaf)
    trunk = per_leaf * rate_bps / oversubscription
    edge = star(hosts, rate_bps)
    links = [
        *edge.links,
        *(f"leaf{leaf} up" for leaf in range(leaves)),
        *(f"leaf{leaf} down" for leaf in range(leaves)),
    ]
    first = 2 * hosts

    def path(a: int, b: int) -> Path:
        above, below = a // per_leaf, b // per_leaf
        if above == below:
            return (a, hosts + b)
        return (a, first + above, first + leaves + below, hosts + b)

    rates = np.concatenate([edge.rate_bps, np.full(2 * leaves, trunk)])
    dimensions = (Dimension(True, per_leaf, rate_bps), Dimension(True, leaves, rate_bps / oversubscription))
    return Topology("two-tier", hosts, tuple(links), rates, path, dimensions if hosts == leaves * per_leaf else ())


def ring(hosts: int, rate_bps: float) -> Topology:
    """Hosts in a ring, each with a link to both neighbours; data take the shorter way."""
    return torus((hosts,), rate_bps)


def torus(sides: Sequence[int], rate_bps: float) -> Topology:
    """Hosts in a torus with sides of some lengths; data go along the first dimension first, the shorter way round."""
    hosts = math.prod(sides)
    steps = [math.prod(sides[dimension + 1 :]) for dimension in range(len(sides))]
    links = [f"h{host} dim{d} {sign}" for host in range(hosts) for d in range(len(sides)) for sign in "+-"]

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
        "torus" if len(sides) > 1 else "ring", hosts, tuple(links), np.full(len(links), float(rate_bps)), path,
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
    links = [f"h{host} {way}" for way in ("up", "down") for host in range(hosts)]
    lower = len(links)
    links += [f"edge{e} agg{a} {way}" for way in ("up", "down") for e in range(edges) for a in range(half)]
    upper = len(links)
    links += [
        f"pod{p} agg{a} core{c} {way}"
        for way in ("up", "down")
        for p in range(ports)
        for a in range(half)
        for c in range(half)
    ]
    between, above = edges * half, ports * half * half

    def path(a: int, b: int) -> Path:
        edge_a, edge_b = a // half, b // half
        if edge_a == edge_b:
            return (a, hosts + b)
        choice = (a * 2654435761 + b) % (half * half)
        aggregate, core = divmod(choice, half)
        up, down = lower + edge_a * half + aggregate, lower + between + edge_b * half + aggregate
        pod_a, pod_b = edge_a // half, edge_b // half
        if pod_a == pod_b:
            return (a, up, down, hosts + b)
        rise = upper + (pod_a * half + aggregate) * half + core
        fall = upper + above + (pod_b * half + aggregate) * half + core
        return (a, up, rise, fall, down, hosts + b)

    return Topology("fat-tree", hosts, tuple(links), np.full(len(links), float(rate_bps)), path)
