"""Describes the layout of a virtual testbed: hosts, switches, links, and the roles of the hosts.

A host has two interfaces on each of its links: ``eth0`` for the training job and ``cross0`` for cross traffic, so that
the counters of ``cross0`` at the receiving host give the cross traffic that passed the bottleneck. Jobs that share
links have an interface each: ``job0`` and so on. In a ring and a torus, a host has several links, with ``eth1``,
``cross1`` and ``job0-1`` and so on, and forwards for others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from ringtap.core.counter_growth import growth
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.link_counter_sources import nic_counter
from ringtap.core.sweep_plans.sweep_plan import CUSTOM, THESIS_HOSTS, Testbed
from ringtap.core.testbed_options import FAT_TREE_HOSTS, NAME_RULE, SWITCH, LinkOptions, is_name, parse_sides
from ringtap.workload import topologies

# a star's own interface, and the address of the switch at which a process adds gradients in the network
SWITCH_NIC, AGGREGATOR_IP = "bridge", "10.77.0.254"
# the switch at which a process adds gradients, by topology; hosts of the others forward by themselves
AGGREGATORS = {"star": SWITCH, "leaf-spine": "spine0", "fat-tree": "core0"}
TRAINING_NIC = "eth0"
CROSS_NIC = "cross0"
_FIRST_JOB_NETWORK = 10  # third number of its addresses
_TRAINING, _CROSS = TRAINING_NIC[:-1], CROSS_NIC[:-1]
_BYTES_BITS, _PACKETS_BITS = 64, 32  # of the kernel's counters of a limit


def cross_nic(nic: str) -> str:
    """Return the interface for cross traffic that shares a link with an interface for training."""
    return nic.replace(_TRAINING, _CROSS)


def _refuse(option: str, why: str) -> NoReturn:
    raise UsageError(f"{option} {why}")


class Link(NamedTuple):
    """One direction of a link between two nodes, which are hosts or switches.

    Attributes:
        source: node from which it leads.
        source_nic: interface there, whose limit gives the link its rate.
        target: node to which it leads.
        target_nic: interface there.
        rate_bps: its rate, counted on Ethernet frames.
    """

    source: str
    source_nic: str
    target: str
    target_nic: str
    rate_bps: int

    @property
    def place(self) -> tuple[str, str]:
        """Node and direction as in run.json: a star's host and ``up`` or ``down``, or the source and its target."""
        if SWITCH in (self.source, self.target):
            return (self.source, "up") if self.target == SWITCH else (self.target, "down")
        between_hosts = self.source_nic.startswith(_TRAINING) and self.target_nic.startswith(_TRAINING)
        return self.source, f"to {self.target}" + (f" by {self.source_nic}" if between_hosts else "")


class LinkCount(NamedTuple):
    """Counters of a link's limit since the testbed was built.

    Attributes:
        begin_ns: time before they were read (CLOCK_MONOTONIC, ns).
        end_ns: time after that.
        size_bytes: bytes of Ethernet frames.
        packets: frames; each segment of what TCP passed on in one piece counts.
    """

    begin_ns: int
    end_ns: int
    size_bytes: int
    packets: int

    def since(self, before: LinkCount) -> tuple[float, float] | None:
        """Return the bytes and frames that were counted since an earlier reading; None if the counters were reset."""
        size_bytes = growth(before.size_bytes, self.size_bytes, _BYTES_BITS)
        packets = growth(before.packets, self.packets, _PACKETS_BITS)
        return None if size_bytes is None or packets is None else (size_bytes, packets)


def carried_bps(link: Link, before: LinkCount, after: LinkCount) -> float:
    """Return the mean rate that a link carried from one reading of its counters to a later one, in bit/s.

    Raises:
        MeasurementError: the counters were reset in between.
    """
    counted = after.since(before)
    if counted is None:
        raise MeasurementError(
            f"the counters of {link.source_nic} of {link.source} were reset while they were read, so what the link "
            "carried is not known: was its limit changed? Measure anew"
        )
    return counted[0] * 8e9 / (after.begin_ns - before.begin_ns)


@dataclass(frozen=True)
class TestbedSpec(LinkOptions):
    """Description of a testbed.

    Attributes:
        name: name of the testbed, unique among those that are up.
        hosts: host names, in the order of their addresses.
        rate_bps: limit of every link, in each direction, counted on Ethernet frames; those between switches of
            ``leaf-spine`` have the limit that the oversubscription gives.
        jobs: jobs for which each host has an interface of its own on each of its links.
    """

    name: str
    hosts: tuple[str, ...]
    rate_bps: int
    jobs: int = 0

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise UsageError(f"{self.name!r} is not a valid name of a testbed: {NAME_RULE}")
        self.check(self.hosts, self.rate_bps, _refuse)

    @cached_property
    def network(self) -> topologies.Topology:
        """Graph of the topology, whose host number i is ``hosts[i]``."""
        hosts, rate_bps = len(self.hosts), float(self.rate_bps)
        if self.topology == "leaf-spine":
            return topologies.leaf_spine(hosts, rate_bps, self.per_leaf, self.oversubscription, self.spines)
        if self.topology == "fat-tree":
            return topologies.fat_tree(2 * (FAT_TREE_HOSTS.index(hosts) + 1), rate_bps)
        if self.topology == "torus":
            return topologies.torus(parse_sides(self.sides), rate_bps)
        return topologies.star(hosts, rate_bps) if self.topology == "star" else topologies.ring(hosts, rate_bps)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """All links, one per direction."""
        names = {f"h{number}": host for number, host in enumerate(self.hosts)}
        nics: dict[tuple[str, str], str] = {}  # by node and peer
        used = Counter[str]()
        found = []
        for ends, rate_bps in zip(self.network.ends, self.network.rate_bps, strict=True):
            source, target = (names.get(end, end) for end in ends)
            for node, peer in ((source, target), (target, source)):
                if (node, peer) not in nics:
                    nics[node, peer] = f"{_TRAINING}{used[node]}" if node in self.hosts else self.port(peer)
                    used[node] += 1
            found.append(Link(source, nics[source, target], target, nics[target, source], round(rate_bps)))
        return tuple(found)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Names of the switches, then of the hosts."""
        switches = dict.fromkeys(end for link in self.links for end in (link.source, link.target))
        return (*(node for node in switches if node not in self.hosts), *self.hosts)

    @property
    def aggregator(self) -> str | None:
        """Switch at which a process may add gradients."""
        return AGGREGATORS.get(self.topology)

    def training_ip(self, host: str) -> str:
        """Address of the host's training interface, or of the switch that adds gradients."""
        if host == self.aggregator:
            return AGGREGATOR_IP
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def cross_ip(self, host: str) -> str:
        """Address of the host's cross traffic interface."""
        return f"10.78.0.{self.hosts.index(host) + 1}"

    @staticmethod
    def job_nic(job: int, nic: str = TRAINING_NIC) -> str:
        """Name of a host's interface for a job that shares a link with an interface for training."""
        return f"job{job}" if nic == TRAINING_NIC else nic.replace(_TRAINING, f"job{job}-")

    @staticmethod
    def job_network(job: int) -> str:
        """Network of a job's addresses."""
        return f"10.77.{_FIRST_JOB_NETWORK + job}.0/24"

    def job_ip(self, host: str, job: int) -> str:
        """Address of the host's interface for a job."""
        return f"10.77.{_FIRST_JOB_NETWORK + job}.{self.hosts.index(host) + 1}"

    def switch_ip(self, switch: str) -> str:
        """Address of a switch that routes."""
        if switch == self.aggregator:
            return AGGREGATOR_IP
        return f"10.79.0.{self.nodes.index(switch) + 1}"

    @staticmethod
    def port(host: str) -> str:
        """Name of a switch's port towards a host or another switch."""
        return f"to-{host}"

    def to_json(self) -> dict[str, Any]:
        """Return the testbed as plain data."""
        return asdict(self) | {"hosts": list(self.hosts)}

    @classmethod
    def from_json(cls, item: dict[str, Any]) -> TestbedSpec:
        """Return the testbed from plain data.

        Fields that another version of ringtap has added are ignored, so that its testbeds can still be removed.
        """
        known = {field.name for field in fields(cls)}
        return cls(**({key: value for key, value in item.items() if key in known} | {"hosts": tuple(item["hosts"])}))


class JobShare(NamedTuple):
    """Share of a job in links, as in `ringtap.workload.fluid_sharing_model`, and what its growth needs.

    Attributes:
        intercept: weight when an iteration begins.
        slope: growth of the weight until all bytes of the iteration are sent.
        priority: a job of a lower one gets what those of a higher one leave, and little more.
        iteration_bytes: bytes of an iteration, on the wire, if the weight grows.
        gap_s: silence after which an iteration begins, if the weight grows.
        congestion_control: TCP congestion control of connections that it opens; empty: the testbed's.
    """

    intercept: float = 1.0
    slope: float = 0.0
    priority: int = 0
    iteration_bytes: float = 0.0
    gap_s: float = 0.0
    congestion_control: str = ""


@dataclass(frozen=True)
class Roles:
    """Hosts that train and hosts that send cross traffic (Figure 3-1 of the thesis).

    Attributes:
        configuration: ``A``, ``B`` or ``custom``.
        workers: hosts of the training job, rank 0 first.
        cross_from: host that sends cross traffic.
        cross_to: host that receives it.
        servers: hosts of the training job's parameter servers.
    """

    configuration: str
    workers: tuple[str, ...]
    cross_from: str
    cross_to: str
    servers: tuple[str, ...] = ()

    def bottleneck(self) -> dict[str, Any]:
        """Return the counters of the traffic through the bottleneck (docs/reference/run-directory.md).

        If the sender of cross traffic also trains, its own uplink is the bottleneck; otherwise it is the switch's
        port towards the receiver.
        """
        end, direction = (self.cross_from, "rx") if self.cross_from in self.workers else (self.cross_to, "tx")
        total = nic_counter(SWITCH, TestbedSpec.port(end), direction)
        return {"cross": [nic_counter(self.cross_to, CROSS_NIC, "rx")], "total": [total]}


def roles_of(testbed: Testbed) -> Roles:
    """Return the roles of the hosts of a plan's testbed.

    A: four workers; S0 sends cross traffic to S3, and its outbound queue is the bottleneck.
    B: S2 sends cross traffic to S0 and does not train; the switch port towards S0 is the bottleneck.
    """
    if testbed.configuration == CUSTOM:
        return Roles(CUSTOM, testbed.workers, testbed.cross_from, testbed.cross_to, testbed.servers)
    if testbed.configuration == "A":
        # gloo's ring runs from each rank to the previous one, so all that S3 receives comes through S0's uplink
        return Roles("A", THESIS_HOSTS, "S0", "S3", testbed.servers)
    return Roles("B", ("S0", "S1", "S3"), "S2", "S0", testbed.servers)
