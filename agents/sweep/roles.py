"""Roles, addresses and bottleneck counters of a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringtap.agents.testbed.topology import CROSS_NIC, SWITCH, TRAINING_NIC, Roles, TestbedSpec


@dataclass(frozen=True)
class Attachment:
    """A host's way to the network that a sweep measures.

    Attributes:
        nics: interfaces that together count each of its frames once.
        addresses: all addresses that they have.
        why: why the sweep's traffic cannot be told from other traffic there; empty where it can.
    """

    nics: tuple[str, ...]
    addresses: frozenset[str]
    why: str = ""


@dataclass(frozen=True)
class SweepRoles:
    """The hosts of a sweep as they stand.

    Attributes:
        roles: who trains and who disturbs.
        recorded: every place whose interfaces are recorded.
        training: address of the training traffic, by host.
        cross: address of the cross traffic, by host.
        interface: interface of the training traffic, by worker.
        bottleneck: what run.json keeps of it: the counters ``cross`` and ``total``, and the ``mtu``.
        one_clock: whether all hosts share a kernel and so its clock.
        iperf3: path of iperf3 by host; empty where there is none.
        most_load_bps: what cross traffic may come to at most; 0: whatever the plan asks for.
        ports: first and last TCP port that may be listened on; None: any.
        kernel_ports: first and last port that each host's kernel picks.
        links: interfaces that carry the sweep's traffic, and those they stand on, by host.
        attachments: where the sweep's traffic enters and leaves each host that has any.
    """

    roles: Roles
    recorded: tuple[str, ...]
    training: Mapping[str, str]
    cross: Mapping[str, str]
    interface: Mapping[str, str]
    bottleneck: dict[str, Any]
    one_clock: bool
    iperf3: Mapping[str, str]
    most_load_bps: int = 0
    ports: tuple[int, int] | None = None
    kernel_ports: Mapping[str, Sequence[str]] = field(default_factory=dict)
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attachments: Mapping[str, Attachment] = field(default_factory=dict)

    @property
    def timekeeper(self) -> str:
        """The place whose recorder says whether the machine kept time: the bottleneck's."""
        return str(self.bottleneck["total"][0]["node"])

    def clock(self) -> dict[str, Any]:
        """The hosts' clocks as a job's run.json describes them."""
        return {"one_clock": True} if self.one_clock else {"reference": self.roles.workers[0]}


def testbed_roles(spec: TestbedSpec, roles: Roles, iperf3: str) -> SweepRoles:
    """The stage that a testbed is."""
    return SweepRoles(
        roles=roles,
        recorded=(SWITCH, *spec.hosts),
        training={host: spec.training_ip(host) for host in spec.hosts},
        cross={host: spec.cross_ip(host) for host in spec.hosts},
        interface=dict.fromkeys(roles.workers, TRAINING_NIC),
        bottleneck=roles.bottleneck() | {"mtu": spec.mtu},
        one_clock=True,
        iperf3=dict.fromkeys(spec.hosts, iperf3),
        links={SWITCH: tuple(spec.port(host) for host in spec.hosts)},
        attachments={
            host: Attachment(
                (TRAINING_NIC, CROSS_NIC),
                frozenset((spec.training_ip(host), spec.cross_ip(host))),
                "a testbed's links carry nothing else",
            )
            for host in spec.hosts
        },
    )
