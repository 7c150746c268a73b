"""Describes counters of the traffic on a link, by source: logs, columns, and conversion to bytes of frames.

Interface counters see no RDMA. The counters of the Ethernet port (``ethtool -S``, ``*_phy``) and those of an InfiniBand
port see all traffic, TCP and RDMA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringtap.core.counter_growth import MAX_GAP_SHARE
from ringtap.core.ethernet import frame_bytes
from ringtap.core.run_directory_schema import NIC_REC

NIC, ETHTOOL, INFINIBAND = "nic", "ethtool", "infiniband"
_CHECKSUM_BYTES = 4  # of an Ethernet frame, which *_phy counters include
_ETHTOOL_S, _INFINIBAND_S = 1.0, 0.1  # a driver asks its firmware under a lock
# interfaces that count the bytes of other interfaces again, or carry no bytes of a job
_VIRTUAL = re.compile(r"(docker|br-|virbr|veth|ifb|dummy|bonding_masters)")
_VERB = {"rx": "rcv", "tx": "xmit"}


@dataclass(frozen=True)
class Source:
    """A kind of counters.

    Attributes:
        log: the log in a node's folder; ``{}`` stands for the interface or the port.
        columns: names of the columns; ``{nic}`` is the interface, ``{way}`` and ``{verb}`` are the direction.
        to_bytes: bytes of frames without checksum by growth of the columns and MTU; data are in octets.
        needs_mtu: whether the bytes depend on the MTU.
        period_s: period at which a sweep samples the counters, in s.
    """

    log: str
    columns: tuple[str, ...]
    to_bytes: Callable[[Sequence[float], int], float]
    period_s: float
    needs_mtu: bool = False

    @property
    def min_window_s(self) -> float:
        """Shortest window whose edges may lie between two samples, with room for late samples."""
        return 1.25 * self.period_s / MAX_GAP_SHARE


SOURCES = {
    NIC: Source(
        NIC_REC,
        ("{nic}.{way}_bytes", "{nic}.{way}_packets"),
        lambda grown, mtu: frame_bytes(grown[0], grown[1], mtu),
        0.01,
        needs_mtu=True,
    ),
    ETHTOOL: Source(
        "ethtool/{}.rec",
        ("{way}_bytes_phy", "{way}_packets_phy"),
        lambda grown, _: grown[0] - _CHECKSUM_BYTES * grown[1],
        _ETHTOOL_S,
    ),
    # from the local route header to the invariant checksum; without the variant checksum
    INFINIBAND: Source("infiniband/{}.rec", ("port_{verb}_data",), lambda grown, _: grown[0], _INFINIBAND_S),
}


def nic_counter(node: str, nic: str, direction: str) -> dict[str, str]:
    """Return the counter of an interface for run.json."""
    return {"node": node, "nic": nic, "direction": direction}


def source_of(counter: Mapping[str, str]) -> Source:
    """Return the source of a counter of run.json; older runs have interface counters only."""
    return SOURCES[counter.get("source", NIC)]


def log_of(counter: Mapping[str, str]) -> str:
    """Return the log of a counter, relative to its node's folder."""
    return source_of(counter).log.format(counter.get("port") or counter["nic"])


def columns_of(counter: Mapping[str, str]) -> list[str]:
    """Return the columns of a counter in its log."""
    way = counter["direction"]
    return [name.format(nic=counter["nic"], way=way, verb=_VERB[way]) for name in source_of(counter).columns]


def stated_mtu(counter: Mapping[str, str], bottleneck: Mapping[str, Any], topology: Mapping[str, Any]) -> int | None:
    """Return the MTU of a counter's interface as run.json states it; None if it does not.

    Args:
        counter: a counter of run.json.
        bottleneck: ``bottleneck`` of run.json, which has the MTU of the first interface of its total.
        topology: ``topology`` of the plan, which has that of all interfaces of a testbed.
    """
    total, mtu = bottleneck.get("total"), topology.get("mtu")
    first = total[0] if isinstance(total, list) and total else total
    if mtu is None and isinstance(first, Mapping) and all(first[key] == counter[key] for key in ("node", "nic")):
        mtu = bottleneck.get("mtu")
    return None if mtu is None else int(mtu)


def stacked(before: Mapping[str, Any]) -> set[str]:
    """Return the interfaces whose bytes another interface of the node counts as well (macvlan, VLAN, bond, bridge).

    Args:
        before: facts of node.json about the node before the run.
    """
    return {name for name, link in (before.get("links") or {}).items() if link.get("below")}


def count_once(nics: Iterable[str], before: Mapping[str, Any]) -> list[str]:
    """Return the interfaces of a node that together count each byte of a job once; loopback is one of them.

    Args:
        nics: its interfaces.
        before: facts of node.json about the node before the run.
    """
    above = stacked(before)
    return [name for name in nics if not _VIRTUAL.match(name) and name not in above]


def counts_pauses(column: str) -> bool:
    """Return True if a column of ``ethtool -S`` counts pause frames: not their duration, nor the same frames again."""
    return "pause" in column and not any(word in column for word in ("duration", "transition", "storm", "_ctrl"))


def counts_marks(column: str) -> bool:
    """Return True if a column of ``ethtool -S`` counts packets with a congestion mark."""
    return "ecn_mark" in column
