"""Defines the options of a testbed's links and topology, and what a testbed can be; plans and ``testbed up`` use it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NoReturn

from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.ethernet import ETHERNET_BYTES, ETHERNET_MTU
from ringtap.core.units import format_rate, whole_number

TOPOLOGIES = ("star", "leaf-spine", "fat-tree", "torus", "ring")
# topologies to which an option belongs
TOPOLOGY_OF = {"per_leaf": "leaf-spine", "spines": "leaf-spine", "oversubscription": "leaf-spine", "sides": "torus"}
SWITCH = "switch"  # of a star
# names of the other switches by topology, without their numbers
SWITCHES = {"leaf-spine": ("leaf", "spine"), "fat-tree": ("edge", "agg", "core")}
MAX_HOSTS = 200
# least and greatest value
LIMITS = {
    "per_leaf": (1, MAX_HOSTS),
    "spines": (1, 16),
    "oversubscription": (1, 100),
    "mtu": (576, 9000),
    "offload_segments": (1, 44),  # no segmentation offload, and the usual 64 kB
    "delay_s": (0, 10),
}
MIN_RATE_BPS, MAX_RATE_BPS = 100_000, 30_000_000_000
FAT_TREE_HOSTS = tuple(ports**3 // 4 for ports in range(2, 9, 2))
MAX_DIMENSIONS = 6
NAME_RULE = "1 to 10 letters, digits and dashes, beginning with a letter"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,9}")

Refuse = Callable[[str, str], NoReturn]


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Limits of the links of a testbed, and the topology that they form.

    Attributes:
        queue_bytes: capacity of the queue before each limit; packets beyond it are dropped.
        burst_bytes: bucket size of the token bucket filter.
        mtu: bytes of an IP packet.
        congestion_control: TCP congestion control of every route.
        offload_segments: packets that TCP may pass to a link in one piece; 1: no segmentation offload, 44: the usual
            64 kB.
        topology: kind of topology, one of `TOPOLOGIES`.
        per_leaf: hosts per leaf switch, for ``leaf-spine``.
        spines: spine switches, for ``leaf-spine``.
        oversubscription: rate of a leaf's hosts over that of its links to the spines, for ``leaf-spine``.
        sides: lengths of the sides, such as ``4x4``, for ``torus``.
        delay_s: time by which each link delays its packets, in each direction.
    """

    queue_bytes: int = 400_000
    burst_bytes: int = 65_536
    mtu: int = ETHERNET_MTU
    congestion_control: str = "cubic"
    offload_segments: int = 4
    topology: str = "star"
    per_leaf: int = 2
    spines: int = 1
    oversubscription: float = 1.0
    sides: str = ""
    delay_s: float = 0.0

    def host_rate_bps(self, slowest_bps: float) -> int:
        """Return the rate of the hosts' links from that of the slowest links, which may be those between switches."""
        return round(max(1.0, 1 / self._uplink_share()) * slowest_bps)

    def _uplink_share(self) -> float:
        """Return the rate of a link between switches over that of a host's link."""
        return self.per_leaf / self.oversubscription / self.spines if self.topology == "leaf-spine" else 1.0

    def check(self, hosts: Sequence[str], rate_bps: int, refuse: Refuse) -> None:
        """Check that a testbed can have these options.

        Args:
            hosts: names of its hosts.
            rate_bps: rate of the hosts' links.
            refuse: function that raises the error of an option, from its name and what is wrong with it.
        """
        for name in hosts:
            if not is_name(name):
                refuse("hosts", f"names {name!r}, which is not a valid name: {NAME_RULE}")
            if hosts.count(name) > 1:
                refuse("hosts", f"names {name!r} twice: give each host of a testbed a name of its own")
        if not 2 <= len(hosts) <= MAX_HOSTS:
            refuse("hosts", f"has {len(hosts) or 'none'}: a testbed needs 2 to {MAX_HOSTS} hosts")
        for name, (least, most) in LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most:
                unit = " s" if name.endswith("_s") else ""
                refuse(name.removesuffix("_s"), f"= {value:g}{unit} is outside {least} to {most}{unit}")
        smallest = self.mtu * self.offload_segments + ETHERNET_BYTES
        for name, size_bytes in (("burst", self.burst_bytes), ("queue", self.queue_bytes)):
            if size_bytes < smallest:
                pieces = f"{self.offload_segments} packets in one piece, {smallest} bytes at least"
                refuse(name, f"= {size_bytes} bytes is too small: it must hold {pieces}")
        self._check_topology(hosts, refuse)
        for bps in (rate_bps, rate_bps * self._uplink_share()):
            if not MIN_RATE_BPS <= bps <= MAX_RATE_BPS:
                limits = f"{format_rate(MIN_RATE_BPS)} to {format_rate(MAX_RATE_BPS)}"
                refuse("rate", f"gives links of {format_rate(bps)}: those of a testbed have {limits}")

    def _check_topology(self, hosts: Sequence[str], refuse: Refuse) -> None:
        """Refuse numbers and names of hosts that a kind of topology cannot have, and options of other kinds."""
        kind, count = self.topology, len(hosts)
        if kind not in TOPOLOGIES:
            refuse("topology", f"= {kind!r} is unknown: {did_you_mean(kind, TOPOLOGIES)}choose {', '.join(TOPOLOGIES)}")
        for field in fields(LinkOptions):
            if (needed := TOPOLOGY_OF.get(field.name, kind)) != kind and getattr(self, field.name) != field.default:
                refuse(field.name, f"is for topology {needed!r}, and this one is {kind!r}")
        if kind == "leaf-spine" and (self.per_leaf == count or count % self.per_leaf):
            refuse("per_leaf", f"= {self.per_leaf}, and {count} hosts do not fill two or more leaves of it")
        elif kind == "fat-tree" and count not in FAT_TREE_HOSTS:
            choices = ", ".join(map(str, FAT_TREE_HOSTS))
            refuse("topology", f"= 'fat-tree' of switches with k ports has k³/4 hosts ({choices}), not {count}")
        elif kind == "torus":
            self._check_sides(count, refuse)
        elif kind == "ring" and count < 3:
            refuse("hosts", f"has {count}: a ring needs three or more hosts")
        names = "|".join(SWITCHES.get(kind, ()))
        if taken := next((host for host in hosts if re.fullmatch(rf"({names})\d+", host)), ""):
            refuse("hosts", f"names {taken!r}, which is the name of a switch of this topology: name the host otherwise")

    def _check_sides(self, count: int, refuse: Refuse) -> None:
        if not self.sides:
            refuse("sides", 'is missing: a torus needs sides, such as "4x4" for 16 hosts')
        try:
            sides = parse_sides(self.sides)
        except UsageError as error:
            refuse("sides", f"is not understood: {error}")
        if math.prod(sides) != count or min(sides) < 3 or len(sides) < 2:
            refuse("sides", f"= {self.sides!r} are not two or more lengths above 2 with the product {count}")


def is_name(text: str) -> bool:
    """Return True if a testbed or one of its hosts can have a name."""
    return bool(_NAME.fullmatch(text)) and text != SWITCH


def parse_sides(text: str) -> list[int]:
    """Return the lengths of a torus's sides from text such as ``4x4x2``.

    Raises:
        UsageError: they are not one to six lengths above 0.
    """
    sides = [whole_number(side, "sides") for side in text.split("x")]
    if min(sides) < 1 or len(sides) > MAX_DIMENSIONS:
        raise UsageError(f"sides {text} are not one to {MAX_DIMENSIONS} lengths above 0, such as 4x4")
    return sides
