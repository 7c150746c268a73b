"""Layout of a virtual testbed, independent of its implementation.

A host has two interfaces on each of its links: ``eth0`` for the training job and ``cross0`` for cross traffic, so that
the counters of ``cross0`` at the receiving host give the cross traffic that passed the bottleneck. Jobs that share
links have an interface each: ``job0`` and so on. In a ring and a torus, a host has several links, with ``eth1``,
``cross1`` and ``job0-1`` and so on, and forwards for others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.link_counters import nic_counter
from ringtap.core.sweep_plan import TOPOLOGY_OF, LinkOptions
from ringtap.core.units import format_rate
from ringtap.workload import topologies

SWITCH = topologies.SWITCH
# a star's own interface, and the address of the switch at which a process adds gradients in the network
SWITCH_NIC, AGGREGATOR_IP = "bridge", "10.77.0.254"
# the switch at which a process adds gradients, by topology; hosts of the others forward by themselves
AGGREGATORS = {"star": SWITCH, "leaf-spine": "spine0", "fat-tree": "core0"}
TRAINING_NIC = "eth0"
CROSS_NIC = "cross0"
_FIRST_JOB_NETWORK = 10  # third number of its addresses
_TRAINING, _CROSS = TRAINING_NIC[:-1], CROSS_NIC[:-1]
MAX_HOSTS = 200
MAX_SPINES = 16
MAX_OVERSUBSCRIPTION = 100
MAX_DELAY_S = 10.0
MIN_RATE_BPS = 100_000
FAT_TREE_HOSTS = tuple(ports**3 // 4 for ports in range(2, 9, 2))
_HOST = re.compile(r"h\d+")  # of a graph
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,9}")


def cross_nic(nic: str) -> str:
    """Return the interface for cross traffic that shares a link with an interface for training."""
    return nic.replace(_TRAINING, _CROSS)


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
        for name in (self.name, *self.hosts):
            if not _NAME.fullmatch(name) or name == SWITCH:
                raise UsageError(
                    f"{name!r} is not a valid name: 1 to 10 letters, digits and dashes, beginning with a letter"
                )
        if twice := [name for name in self.hosts if self.hosts.count(name) > 1]:
            raise UsageError(f"{twice[0]} is named twice: give each host of a testbed a name of its own")
        if not 2 <= len(self.hosts) <= MAX_HOSTS:
            raise UsageError(f"a testbed needs 2 to {MAX_HOSTS} hosts; got {len(self.hosts) or 'none'}")
        if not MIN_RATE_BPS <= self.rate_bps <= 30_000_000_000:
            raise UsageError(f"link rate {self.rate_bps} bit/s is outside 100kbit to 30gbit")
        if not 576 <= self.mtu <= 9000:
            raise UsageError(f"MTU {self.mtu} is outside 576 to 9000")
        if not 1 <= self.offload_segments <= 44:
            raise UsageError(f"{self.offload_segments} offload segments are outside 1 (no offload) to 44 (64 kB)")
        least = self.mtu * self.offload_segments + 14
        if self.burst_bytes < least or self.queue_bytes < least:
            raise UsageError(
                f"burst and queue must hold {self.offload_segments} packets in one piece: {least} bytes at least"
            )
        if not 0 <= self.delay_s <= MAX_DELAY_S:
            raise UsageError(f"delay {self.delay_s:g} s is outside 0 to {MAX_DELAY_S:g} s")
        self._check_topology()

    def _check_topology(self) -> None:
        """Refuse numbers of hosts that a kind of topology cannot have, and options of other kinds."""
        kind, hosts = self.topology, len(self.hosts)
        if kind not in topologies.KINDS:
            hint = did_you_mean(kind, topologies.KINDS)
            raise UsageError(f"topology {kind!r} is unknown: {hint}choose {', '.join(topologies.KINDS)}")
        for field in fields(self):
            if (needed := TOPOLOGY_OF.get(field.name, kind)) != kind and getattr(self, field.name) != field.default:
                raise UsageError(f"{field.name} is for topology {needed!r}, and this one is {kind!r}")
        if kind == "leaf-spine":
            self._check_leaves()
        elif kind == "fat-tree" and hosts not in FAT_TREE_HOSTS:
            choices = ", ".join(map(str, FAT_TREE_HOSTS))
            raise UsageError(f"a fat tree of switches with k ports has k³/4 hosts ({choices}), not {hosts}")
        elif kind == "torus":
            if not self.sides:
                raise UsageError('a torus needs sides, such as "4x4" for 16 hosts')
            sides = topologies.parse_sides(self.sides)
            if math.prod(sides) != hosts or min(sides) < 3 or len(sides) < 2:
                raise UsageError(f"sides {self.sides} are not two or more lengths above 2 with the product {hosts}")
        elif kind == "ring" and hosts < 3:
            raise UsageError("a ring needs three or more hosts")
        if taken := set(self.hosts) & {end for ends in self.network.ends for end in ends if not _HOST.fullmatch(end)}:
            raise UsageError(f"{min(taken)!r} is the name of a switch of this topology: name the host otherwise")
        least_bps = min(link.rate_bps for link in self.links)
        if least_bps < MIN_RATE_BPS:
            raise UsageError(f"links between switches would have {format_rate(least_bps)}, less than 100kbit")

    def _check_leaves(self) -> None:
        hosts = len(self.hosts)
        if not (1 <= self.per_leaf < hosts and hosts % self.per_leaf == 0):
            raise UsageError(
                f"{hosts} hosts do not fill two or more leaves of per_leaf = {self.per_leaf}: use a multiple of it"
            )
        if not 1 <= self.spines <= MAX_SPINES:
            raise UsageError(f"spines = {self.spines} is outside 1 to {MAX_SPINES}")
        if not 1 <= self.oversubscription <= MAX_OVERSUBSCRIPTION:
            raise UsageError(f"oversubscription {self.oversubscription:g} is outside 1 to {MAX_OVERSUBSCRIPTION}")

    @cached_property
    def network(self) -> topologies.Topology:
        """Graph of the topology, whose host number i is ``hosts[i]``."""
        hosts, rate_bps = len(self.hosts), float(self.rate_bps)
        if self.topology == "leaf-spine":
            return topologies.leaf_spine(hosts, rate_bps, self.per_leaf, self.oversubscription, self.spines)
        if self.topology == "fat-tree":
            return topologies.fat_tree(2 * (FAT_TREE_HOSTS.index(hosts) + 1), rate_bps)
        if self.topology == "torus":
            return topologies.torus(topologies.parse_sides(self.sides), rate_bps)
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
    """Share of a job in links, as in `ringtap.workload.bandwidth_sharing`, and what its growth needs.

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


def thesis_roles(configuration: str) -> tuple[tuple[str, ...], Roles]:
    """Return the hosts and roles of a configuration of the thesis.

    A: four workers; S0 sends cross traffic to S3, and its outbound queue is the bottleneck.
    B: S2 sends cross traffic to S0 and does not train; the switch port towards S0 is the bottleneck.

    Raises:
        UsageError: the configuration is neither A nor B.
    """
    hosts = ("S0", "S1", "S2", "S3")
    if configuration == "A":
        # gloo's ring runs from each rank to the previous one, so all that S3 receives comes through S0's uplink
        return hosts, Roles("A", hosts, "S0", "S3")
    if configuration == "B":
        return hosts, Roles("B", ("S0", "S1", "S3"), "S2", "S0")
    raise UsageError(f"configuration {configuration!r} is not known: A or B, or name hosts and roles yourself")
