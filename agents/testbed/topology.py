"""Layout of a virtual testbed, independent of its implementation.

One link connects each host to the switch. A host has two interfaces on that link: ``eth0`` for the training job and
``cross0`` for cross traffic, so that the counters of ``cross0`` at the receiving host give the cross traffic that
passed the bottleneck.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from ringtap.errors import UsageError

SWITCH = "switch"
# the switch's own interface and address, for a process that adds gradients in the network
SWITCH_NIC, SWITCH_IP = "bridge", "10.77.0.254"
TRAINING_NIC = "eth0"
CROSS_NIC = "cross0"
MAX_HOSTS = 200
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,9}")


@dataclass(frozen=True)
class TestbedSpec:
    """Description of a testbed.

    Attributes:
        name: name of the testbed, unique among those that are up.
        hosts: host names, in the order of their addresses.
        rate_bps: limit of every link, in each direction, counted on Ethernet frames.
        queue_bytes: capacity of the queue before each limit; packets beyond it are dropped.
        burst_bytes: bucket size of the token bucket filter.
        mtu: bytes of an IP packet.
        congestion_control: TCP congestion control of every route.
        offload_segments: packets that TCP may pass to a link in one piece; 1: no segmentation offload, 44: the usual
            64 kB.
    """

    name: str
    hosts: tuple[str, ...]
    rate_bps: int
    queue_bytes: int = 400_000
    burst_bytes: int = 65_536
    mtu: int = 1500
    congestion_control: str = "cubic"
    offload_segments: int = 4

    def __post_init__(self) -> None:
        for name in (self.name, *self.hosts):
            if not _NAME.fullmatch(name) or name == SWITCH:
                raise UsageError(
                    f"{name!r} is not a valid name: 1 to 10 letters, digits and dashes, beginning with a letter"
                )
        if len(set(self.hosts)) != len(self.hosts) or not 2 <= len(self.hosts) <= MAX_HOSTS:
            raise UsageError(
                f"a testbed needs 2 to {MAX_HOSTS} hosts, each name once; got {', '.join(self.hosts) or 'none'}"
            )
        if not 100_000 <= self.rate_bps <= 30_000_000_000:
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

    def training_ip(self, host: str) -> str:
        """Address of the host's training interface."""
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def cross_ip(self, host: str) -> str:
        """Address of the host's cross traffic interface."""
        return f"10.78.0.{self.hosts.index(host) + 1}"

    @staticmethod
    def port(host: str) -> str:
        """Name of the switch's port towards a host."""
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
        cross = [{"node": self.cross_to, "nic": CROSS_NIC, "direction": "rx"}]
        if self.cross_from in self.workers:
            total = {"node": SWITCH, "nic": TestbedSpec.port(self.cross_from), "direction": "rx"}
        else:
            total = {"node": SWITCH, "nic": TestbedSpec.port(self.cross_to), "direction": "tx"}
        return {"cross": cross, "total": [total]}


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
