"""Counters of the traffic on a link, by source: logs, columns, and conversion to bytes of frames.

Interface counters see no RDMA. The counters of the Ethernet port (``ethtool -S``, ``*_phy``) and those of an InfiniBand
port see all traffic, TCP and RDMA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringtap.core.counter_growth import MAX_GAP_SHARE
from ringtap.core.ethernet import frame_bytes
from ringtap.core.schema import NIC_REC

NIC, ETHTOOL, INFINIBAND = "nic", "ethtool", "infiniband"
_CHECKSUM_BYTES = 4  # of an Ethernet frame, which *_phy counters include
_DATA_BYTES = 4  # unit of an InfiniBand port's data counters
_ETHTOOL_S, _INFINIBAND_S = 1.0, 0.1  # a driver asks its firmware under a lock
_VERB = {"rx": "rcv", "tx": "xmit"}


@dataclass(frozen=True)
class Source:
    """A kind of counters.

    Attributes:
        log: the log in a node's folder; ``{}`` stands for the interface or the port.
        columns: names of the columns; ``{nic}`` is the interface, ``{way}`` and ``{verb}`` are the direction.
        to_bytes: bytes of frames without checksum by growth of the columns and MTU.
        period_s: period at which a sweep samples the counters, in s.
    """

    log: str
    columns: tuple[str, ...]
    to_bytes: Callable[[Sequence[float], int], float]
    period_s: float

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
    ),
    ETHTOOL: Source(
        "ethtool/{}.rec",
        ("{way}_bytes_phy", "{way}_packets_phy"),
        lambda grown, _: grown[0] - _CHECKSUM_BYTES * grown[1],
        _ETHTOOL_S,
    ),
    # from the local route header to the invariant checksum; without the variant checksum
    INFINIBAND: Source(
        "infiniband/{}.rec", ("port_{verb}_data",), lambda grown, _: _DATA_BYTES * grown[0], _INFINIBAND_S
    ),
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


def counts_pauses(column: str) -> bool:
    """Return True if a column of ``ethtool -S`` counts pause frames: not their duration, nor the same frames again."""
    return "pause" in column and not any(word in column for word in ("duration", "transition", "storm", "_ctrl"))


def counts_marks(column: str) -> bool:
    """Return True if a column of ``ethtool -S`` counts packets with a congestion mark."""
    return "ecn_mark" in column
