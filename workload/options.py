"""Options of the command line that verbs of workloads share: algorithms and topologies."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable

from ringtap.errors import UsageError, did_you_mean
from ringtap.units import parse_duration_s, parse_rate_bps, whole_number
from ringtap.workload.lowering import Algorithms
from ringtap.workload.topologies import Topology, fat_tree, ring, star, torus, two_tier

ALL_REDUCE = ("ring", "halving-doubling", "tree", "double-tree", "hierarchical", "parameter-server", "in-network")


def add_algorithms(parser: ArgumentParser) -> None:
    """Add the options that choose the algorithms of collectives."""
    parser.add_argument("--collective", default="ring", metavar="NAME", help=f"all-reduce: {', '.join(ALL_REDUCE)}")
    parser.add_argument("--group", default="1", metavar="G", help="workers per node, for hierarchical (1)")
    parser.add_argument("--shards", default="1", metavar="K", help="parameter servers (1)")
    parser.add_argument("--pieces", default="1", metavar="P", help="pieces that trees and switches pass on in turn (1)")


def counts(options: Namespace) -> tuple[int, int, int]:
    """Return group, shards and pieces.

    Raises:
        UsageError: one is not a whole number above 0.
    """
    found = []
    for name in ("group", "shards", "pieces"):
        found.append(whole_number(getattr(options, name), f"--{name}"))
        if found[-1] < 1:
            raise UsageError(f"--{name} {found[-1]} is below 1")
    return found[0], found[1], found[2]


def algorithms(options: Namespace) -> Algorithms:
    """Return the algorithms.

    Raises:
        UsageError: the all-reduce is unknown, or a number is wrong.
    """
    if options.collective not in ALL_REDUCE:
        hint = did_you_mean(options.collective, ALL_REDUCE)
        raise UsageError(f"--collective {options.collective!r} is no all-reduce: {hint}choose {', '.join(ALL_REDUCE)}")
    return Algorithms(options.collective, *counts(options))


def add_topology(parser: ArgumentParser) -> None:
    """Add the options that describe the network."""
    parser.add_argument("--topology", default="star", metavar="NAME", help=f"{', '.join(_TOPOLOGIES)} (star)")
    parser.add_argument("--rate", default="25gbit", metavar="RATE", help="rate of the hosts' links (25gbit)")
    parser.add_argument("--latency", default="0s", metavar="TIME", help="time of a message beside its bytes (0s)")
    parser.add_argument("--per-leaf", default="4", metavar="H", help="hosts per leaf switch, for two-tier (4)")
    parser.add_argument(
        "--oversubscription", default=1.0, type=float, metavar="X", help="of the leaves, for two-tier (1)"
    )
    parser.add_argument("--sides", metavar="AxBx...", help="lengths of the sides, for torus")


def _two_tier(hosts: int, rate_bps: float, options: Namespace) -> Topology:
    per_leaf = whole_number(options.per_leaf, "--per-leaf")
    if per_leaf < 1 or not 0 < options.oversubscription < 1e6:
        raise UsageError("--per-leaf and --oversubscription are above 0")
    return two_tier(hosts, rate_bps, per_leaf, options.oversubscription)


def _torus(_hosts: int, rate_bps: float, options: Namespace) -> Topology:
    if options.sides is None:
        raise UsageError("--sides is missing: a torus has, for example, --sides 4x4x2")
    sides = [whole_number(side, "--sides") for side in options.sides.split("x")]
    if min(sides) < 1 or len(sides) > 6:
        raise UsageError(f"--sides {options.sides} is not one to six lengths above 0")
    return torus(sides, rate_bps)


def _fat_tree(hosts: int, rate_bps: float, _options: Namespace) -> Topology:
    ports = 2
    while ports**3 // 4 < hosts:
        ports += 2
    return fat_tree(ports, rate_bps)


_TOPOLOGIES: dict[str, Callable[[int, float, Namespace], Topology]] = {
    "star": lambda hosts, rate_bps, _: star(hosts, rate_bps),
    "two-tier": _two_tier,
    "fat-tree": _fat_tree,
    "torus": _torus,
    "ring": lambda hosts, rate_bps, _: ring(hosts, rate_bps),
}


def topology(options: Namespace, hosts: int) -> tuple[Topology, float]:
    """Return the topology for some hosts, and the latency in s.

    Raises:
        UsageError: it is unknown, or has no positive rate.
    """
    if options.topology not in _TOPOLOGIES:
        hint = did_you_mean(options.topology, _TOPOLOGIES)
        raise UsageError(f"--topology {options.topology!r} is unknown: {hint}choose {', '.join(_TOPOLOGIES)}")
    rate_bps = parse_rate_bps(options.rate)
    if rate_bps <= 0:
        raise UsageError(f"--rate {options.rate} is not a positive rate")
    return _TOPOLOGIES[options.topology](hosts, rate_bps, options), parse_duration_s(options.latency)
