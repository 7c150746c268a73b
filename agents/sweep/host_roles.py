"""Describes the roles and addresses of a sweep's hosts, and the counters of its bottleneck."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ringtap.agents.testbed.shortest_path_routes import carries_all
from ringtap.agents.testbed.topology import (
    CROSS_NIC,
    SWITCH_NIC,
    TRAINING_NIC,
    Link,
    Roles,
    TestbedSpec,
    cross_nic,
)
from ringtap.core.link_counter_sources import NIC, SOURCES, nic_counter
from ringtap.core.run_directory_schema import ACKNOWLEDGED
from ringtap.core.testbed_options import SWITCH


@dataclass(frozen=True)
class Attachment:
    """Interfaces that connect a host to the network that a sweep measures.

    Attributes:
        nics: interfaces that together count each frame of the sweep once.
        addresses: all addresses of these interfaces and of those above them.
        why: reason that the sweep's traffic is not separated from other traffic there; empty if it is.
    """

    nics: tuple[str, ...]
    addresses: frozenset[str]
    why: str = ""


@dataclass(frozen=True)
class SweepRoles:
    """Roles, addresses and interfaces of the hosts of a sweep.

    Attributes:
        roles: workers, and sender and receiver of the cross traffic.
        recorded: nodes whose interfaces are recorded.
        training: address of the training traffic, by host.
        cross: address of the cross traffic, by host.
        interface: interface of the training traffic, by worker, parameter server and switch.
        cross_nic: interface of the cross traffic, by host.
        bottleneck: facts for run.json: the counters ``cross`` and ``total``, and the ``mtu``.
        one_clock: True if all hosts share a kernel and thus its clock.
        iperf3: path of iperf3 by host; empty if it has none.
        most_load_bps: highest load of the cross traffic; 0: no limit.
        ports: first and last TCP port on which processes may listen; None: any.
        kernel_ports: first and last port that each host's kernel picks.
        links: interfaces that carry the sweep's traffic, and those below them, by host.
        attachments: interfaces by which the sweep's traffic enters and leaves a host, by host.
        aggregator: switch at which a process may add gradients; empty: none.
        mtus: MTU of each interface, by host; empty for a testbed, whose interfaces all have the bottleneck's.
        rdma: RDMA device and port of the training traffic as NCCL names them (``mlx5_0:1``), by worker that has one.
    """

    roles: Roles
    recorded: tuple[str, ...]
    training: Mapping[str, str]
    cross: Mapping[str, str]
    interface: Mapping[str, str]
    bottleneck: dict[str, Any]
    one_clock: bool
    iperf3: Mapping[str, str]
    cross_nic: Mapping[str, str] = field(default_factory=dict)
    most_load_bps: int = 0
    ports: tuple[int, int] | None = None
    kernel_ports: Mapping[str, Sequence[str]] = field(default_factory=dict)
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attachments: Mapping[str, Attachment] = field(default_factory=dict)
    aggregator: str = ""
    rdma: Mapping[str, str] = field(default_factory=dict)
    mtus: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def mtu(self, counter: Mapping[str, str]) -> int | None:
        """Return the MTU of a counter's interface; None if it is not known."""
        if self.mtus:
            return self.mtus.get(counter["node"], {}).get(counter["nic"])
        mtu: int | None = self.bottleneck["mtu"]
        return mtu

    def _counters(self) -> list[dict[str, str]]:
        cross = self.bottleneck["cross"]
        return [*([] if cross == ACKNOWLEDGED else cross), *self.bottleneck["total"]]

    def sources(self, node: str) -> list[str]:
        """Return the sources of the bottleneck's counters on a node beside its interface counters."""
        found = [counter.get("source", NIC) for counter in self._counters() if counter["node"] == node]
        return [source for source in dict.fromkeys(found) if source != NIC]

    @property
    def period_s(self) -> float:
        """Longest period of the bottleneck's counters, in s."""
        return max(SOURCES[counter.get("source", NIC)].period_s for counter in self._counters())

    @property
    def timekeeper(self) -> str:
        """Node of the bottleneck, whose recorder shows late samples."""
        return str(self.bottleneck["total"][0]["node"])

    def clock(self) -> dict[str, Any]:
        """Return the description of the hosts' clocks for a job's run.json."""
        return {"one_clock": True} if self.one_clock else {"reference": self.roles.workers[0]}


def testbed_roles(spec: TestbedSpec, roles: Roles, iperf3: str) -> SweepRoles:
    """Return the roles and addresses of a testbed's hosts.

    The bottleneck of a star is known. For other topologies it is, until it has been found, what leads to the receiver
    of the cross traffic.
    """
    nics = {host: tuple(link.source_nic for link in spec.links if link.source == host) for host in spec.hosts}
    ports = [link.source_nic for link in spec.links if link.source == spec.aggregator]
    aggregator = {spec.aggregator: SWITCH_NIC if spec.topology == "star" else ports[0]} if spec.aggregator else {}
    network = SweepRoles(
        roles=roles,
        recorded=(SWITCH, *spec.hosts),
        training={host: spec.training_ip(host) for host in spec.hosts},
        cross={host: spec.cross_ip(host) for host in spec.hosts},
        interface=dict.fromkeys((*roles.workers, *roles.servers), TRAINING_NIC) | aggregator,
        aggregator=spec.aggregator or "",
        cross_nic=dict.fromkeys(spec.hosts, CROSS_NIC),
        bottleneck=roles.bottleneck() | {"mtu": spec.mtu},
        one_clock=True,
        iperf3=dict.fromkeys(spec.hosts, iperf3),
        links={SWITCH: tuple(spec.port(host) for host in spec.hosts)},
        attachments={
            host: Attachment(
                nics[host],  # below those for cross traffic
                frozenset((spec.training_ip(host), spec.cross_ip(host))),
                "a testbed's links carry nothing else",
            )
            for host in spec.hosts
        },
    )
    if spec.topology == "star":
        return network
    return through(network, spec, [link for link in spec.links if link.target == roles.cross_to])


def counter_of(link: Link) -> dict[str, str]:
    """Return the counter of a testbed's link for run.json."""
    return nic_counter(link.source, link.source_nic, "tx")


def through(network: SweepRoles, spec: TestbedSpec, links: Sequence[Link]) -> SweepRoles:
    """Return a testbed's roles with other links as the bottleneck; only nodes that have to do with it are recorded."""
    roles = network.roles
    nics = [link.target_nic for link in spec.links if link.target == roles.cross_to]
    cross = [nic_counter(roles.cross_to, cross_nic(nic), "rx") for nic in nics]
    ends: dict[str, tuple[str, ...]] = {}
    for link in links:
        ends[link.source] = (*ends.get(link.source, ()), link.source_nic)
    all_cross = all(carries_all(spec, link, roles.cross_from, roles.cross_to) for link in links)
    counters = {"cross": cross, "total": [counter_of(link) for link in links], "carries_all": all_cross}
    return replace(
        network,
        bottleneck=network.bottleneck | counters,
        recorded=tuple(dict.fromkeys((*ends, *roles.workers, roles.cross_from, roles.cross_to))),
        links=ends,
    )
