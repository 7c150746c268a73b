"""Options of a virtual testbed's links, the same in a plan and in a testbed as built."""

from __future__ import annotations

from dataclasses import dataclass


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
        topology: kind of topology, one of `ringtap.workload.topologies.KINDS`.
        per_leaf: hosts per leaf switch, for ``leaf-spine``.
        spines: spine switches, for ``leaf-spine``.
        oversubscription: rate of a leaf's hosts over that of its links to the spines, for ``leaf-spine``.
        sides: lengths of the sides, such as ``4x4``, for ``torus``.
        delay_s: time by which each link delays its packets, in each direction.
    """

    queue_bytes: int = 400_000
    burst_bytes: int = 65_536
    mtu: int = 1500
    congestion_control: str = "cubic"
    offload_segments: int = 4
    topology: str = "star"
    per_leaf: int = 2
    spines: int = 1
    oversubscription: float = 1.0
    sides: str = ""
    delay_s: float = 0.0
