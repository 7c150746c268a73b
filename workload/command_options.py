"""Adds options that the verbs of workloads share: algorithms, topologies, loads and the output."""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace, _ActionsContainer
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringtap.core.errors import UsageError, did_you_mean, file_errors
from ringtap.core.sweep_plans.collective_algorithms import ALL_REDUCE
from ringtap.core.testbed_options import TOPOLOGIES, LinkOptions, parse_sides
from ringtap.core.units import parse_duration_s, parse_load, parse_rate_bps, whole_number
from ringtap.workload.topologies import Topology, fat_tree, leaf_spine, ring, star, torus

if TYPE_CHECKING:
    from ringtap.workload.lowering import Algorithms
    from ringtap.workload.simulate_iterations import SimulatedIterations
    from ringtap.workload.workload import Workload

_MAX_LOAD = 0.99
_MAX_SPINES = 1024
MAX_RANKS_PER_HOST = 1024
NO_NETWORK = "Not simulated: for links and the critical path, give the network with --capacity"


def write_output(path: Path, lines: Iterable[str]) -> None:
    """Write the lines of the file of ``-o``.

    Raises:
        UsageError: it cannot be written.
    """
    with file_errors(path, "cannot be written"), path.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)


def read_loads(text: str, capacity_bps: float) -> list[float]:
    """Return the loads of FROM:TO:STEP, or of one load, as shares of the capacity.

    Raises:
        UsageError: it is neither, or a load is not from 0 to 0.99 of the capacity.
    """
    parts = text.split(":")
    numbers = [parse_load(part, capacity_bps, "--loads").share for part in parts] if len(parts) in (1, 3) else []
    if len(numbers) == 1:
        loads = numbers
    elif len(numbers) == 3 and numbers[2] > 0 and (numbers[1] - numbers[0]) / numbers[2] < 1000:
        count = int((numbers[1] - numbers[0]) / numbers[2] + 1e-9) + 1
        loads = [round(numbers[0] + step * numbers[2], 6) for step in range(count)]
    else:
        raise UsageError(f"--loads {text!r} is neither a load nor FROM:TO:STEP, for example 0:0.9:0.1")
    if not loads or not all(0 <= load <= _MAX_LOAD for load in loads):
        raise UsageError(f"--loads {text} has loads outside 0 to {_MAX_LOAD} of the capacity")
    return loads


def add_algorithms(parser: _ActionsContainer) -> None:
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
    group, shards, pieces = (
        whole_number(getattr(options, name), f"--{name}", 1) for name in ("group", "shards", "pieces")
    )
    return group, shards, pieces


def algorithms(options: Namespace) -> Algorithms:
    """Return the algorithms.

    Raises:
        UsageError: the all-reduce is unknown, or a number is wrong.
    """
    if options.collective not in ALL_REDUCE:
        hint = did_you_mean(options.collective, ALL_REDUCE)
        raise UsageError(f"--collective {options.collective!r} is no all-reduce: {hint}choose {', '.join(ALL_REDUCE)}")
    from ringtap.workload.lowering import Algorithms

    return Algorithms(options.collective, *counts(options))


def add_ranks_per_host(parser: _ActionsContainer) -> Action:
    """Add the option for ranks that share a host."""
    return parser.add_argument(
        "--gpus-per-node", metavar="G", help="ranks at each host, with no link between them (the workload's, or 1)"
    )


def ranks_per_host(options: Namespace, workload: Workload) -> int:
    """Return the number of ranks at each host, of the command line or of the workload.

    Raises:
        UsageError: it is not a whole number above 0.
    """
    given = options.gpus_per_node
    found = whole_number(given, "--gpus-per-node") if given is not None else workload.about.get("gpus_per_node", 1)
    if type(found) is not int or not 1 <= found <= MAX_RANKS_PER_HOST:
        raise UsageError(f"--gpus-per-node {found} is outside 1 to {MAX_RANKS_PER_HOST:,}")
    return found


class Network(NamedTuple):
    """Algorithms of collectives, hosts and links, time in s of a message beside its bytes, and ranks at each host."""

    algorithms: Algorithms
    topology: Topology
    latency_s: float
    ranks_per_host: int

    def simulate(self, workload: Workload, iterations: int = 1) -> SimulatedIterations:
        """Simulate iterations of a workload on it."""
        from ringtap.workload.simulate_iterations import simulate

        return simulate(
            workload, self.topology, self.algorithms, iterations=iterations, latency_s=self.latency_s,
            ranks_per_host=self.ranks_per_host,
        )  # fmt: skip


def add_network(parser: ArgumentParser) -> None:
    """Add the options that choose algorithms, and describe the network and the ranks that share a host."""
    group = parser.add_argument_group("network", "how ranks exchange data, and over which links")
    add_algorithms(group)
    actions = [*_add_topology(group), add_ranks_per_host(group)]
    parser.set_defaults(network={action.dest: action.default for action in actions})


def network_if_given(options: Namespace, workload: Workload) -> Network | None:
    """Return the network for a workload; None if the command line says nothing of one.

    Raises:
        UsageError: an option is wrong, or the capacity is missing.
    """
    given = any(getattr(options, name) != default for name, default in options.network.items())
    return network(options, workload) if given else None


def network(options: Namespace, workload: Workload, chosen: Algorithms | None = None, least_hosts: int = 0) -> Network:
    """Return the network for a workload.

    Args:
        options: the command line.
        workload: the workload.
        chosen: algorithms of collectives; None: those of the command line.
        least_hosts: hosts that it has at least.

    Raises:
        UsageError: an option is wrong.
    """
    chosen = algorithms(options) if chosen is None else chosen
    per_host = ranks_per_host(options, workload)
    hosts = max(hosts_of(workload, chosen, per_host), least_hosts)
    return Network(chosen, *topology(options, hosts), per_host)


def hosts_of(workload: Workload, chosen: Algorithms, per_host: int) -> int:
    """Return the number of hosts of the ranks, servers and switches that add of a workload."""
    return -(-(workload.ranks + chosen.others) // per_host)


def _add_topology(parser: _ActionsContainer) -> Iterator[Action]:
    """Add the options that describe the network."""
    add, per_leaf = parser.add_argument, str(LinkOptions.per_leaf)
    yield add("--capacity", metavar="RATE", help="rate of each host's links, such as 25gbit")
    yield add("--topology", default="star", metavar="KIND", help=f"{', '.join(TOPOLOGIES)} (star)")
    yield add("--latency", default="0s", metavar="TIME", help="time of a message beside its bytes (0s)")
    yield add("--per-leaf", default=per_leaf, metavar="H", help=f"hosts per leaf switch, for leaf-spine ({per_leaf})")
    yield add("--oversubscription", default=1.0, type=float, metavar="X", help="of the leaves, for leaf-spine (1)")
    yield add("--spines", default="1", metavar="S", help="spine switches, for leaf-spine (1)")
    yield add("--sides", metavar="AxBx...", help="lengths of the sides, for torus")


def capacity_bps(text: str | None) -> int:
    """Return the capacity of a link in bit/s.

    Raises:
        UsageError: it is missing, or is not a positive rate.
    """
    if text is None:
        raise UsageError(
            "--capacity is missing: give the rate of each host's links, such as 25gbit; ethtool NIC shows it"
        )
    found = parse_rate_bps(text, "--capacity")
    if found <= 0:
        raise UsageError(f"--capacity {text} is not a positive rate")
    return found


def topology(options: Namespace, hosts: int) -> tuple[Topology, float]:
    """Return the topology for some hosts, and the latency in s.

    Raises:
        UsageError: it is unknown, its capacity is missing, or one of its numbers is wrong.
    """
    if options.topology not in TOPOLOGIES:
        hint = did_you_mean(options.topology, TOPOLOGIES)
        raise UsageError(f"--topology {options.topology!r} is unknown: {hint}choose {', '.join(TOPOLOGIES)}")
    rate_bps, latency_s = capacity_bps(options.capacity), parse_duration_s(options.latency, "--latency")
    if options.topology == "leaf-spine":
        per_leaf, spines = whole_number(options.per_leaf, "--per-leaf"), whole_number(options.spines, "--spines")
        if per_leaf < 1 or not 1 <= spines <= _MAX_SPINES or not 0 < options.oversubscription < 1e6:
            raise UsageError(f"--per-leaf, --spines (at most {_MAX_SPINES}) and --oversubscription are above 0")
        return leaf_spine(hosts, rate_bps, per_leaf, options.oversubscription, spines), latency_s
    if options.topology == "torus":
        if options.sides is None:
            raise UsageError("--sides is missing: a torus has, for example, --sides 4x4x2")
        return torus(parse_sides(options.sides), rate_bps), latency_s
    if options.topology == "fat-tree":
        ports = 2
        while ports**3 // 4 < hosts:
            ports += 2
        return fat_tree(ports, rate_bps), latency_s
    simple = star if options.topology == "star" else ring
    return simple(hosts, rate_bps), latency_s
