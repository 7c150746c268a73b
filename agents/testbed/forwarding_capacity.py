"""Estimates whether this machine can carry the traffic between the nodes of a testbed.

The CPU times are those that iperf3 needs over one to four links (docs/commands/testbed.md): each depends on the bytes,
and on the pieces that nodes pass on.
"""

from __future__ import annotations

import os
from statistics import fmean

from ringtap.agents.testbed.shortest_path_routes import hops
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.ethernet import ETHERNET_MTU
from ringtap.core.units import counted, format_rate

# CPU seconds per Gbit in large pieces, and what pieces of a single packet of `ETHERNET_MTU` bytes add
_ENDS_S, _ENDS_PACKETS_S = 0.02, 0.17
_HOP_S, _HOP_PACKETS_S = 0.005, 0.068


def excess(spec: TestbedSpec, senders: int) -> str:
    """Return a clause if hosts that send at the rate of the slowest links need more cores than there are, or "".

    Args:
        spec: the testbed.
        senders: number of hosts that send at a time.
    """
    distances = [hops(spec, host) for host in spec.hosts]
    mean_hops = fmean(found[host] for found in distances for host in spec.hosts if found[host])
    packets = spec.offload_segments * spec.mtu / ETHERNET_MTU
    gbit_s = _ENDS_S + _ENDS_PACKETS_S / packets + mean_hops * (_HOP_S + _HOP_PACKETS_S / packets)
    rate_bps = min(link.rate_bps for link in spec.links)
    cores, needed = len(os.sched_getaffinity(0)), senders * rate_bps / 1e9 * gbit_s
    if needed <= cores:
        return ""
    return (
        f"{counted(senders, 'host')} that send {format_rate(rate_bps)} over {mean_hops:.1f} links need about "
        f"{needed:.1f} cores to carry it, and this machine has {cores}"
    )
