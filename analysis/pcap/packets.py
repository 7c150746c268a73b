"""Single packets of captures, for the few uses that need them: injection rates, gaps between packets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringtap.analysis.pcap.merge import merge
from ringtap.analysis.pcap.read import scan_packets
from ringtap.analysis.pcap.scan import Scanned
from ringtap.errors import UsageError


def packet_table(paths: Sequence[Path], limit: int = 10_000_000, offsets_ns: Sequence[int] | None = None) -> Scanned:
    """Captures with a row for every packet.

    Args:
        paths: the files.
        limit: most packets to take; each needs 20 bytes of memory.
        offsets_ns: how far the clock of each file is ahead, taken off its times.

    Returns:
        A scan whose ``packets`` (rows of ``layout.PACKET``) are in the order of their times across files; their flows
        are those of its conversations.

    Raises:
        UsageError: a file cannot be read, is no capture, or there are more packets than the limit.
    """
    parts: list[Scanned] = []
    for path in paths:
        parts.append(scan_packets(path))
        packets = sum(len(part.packets) for part in parts)
        if packets > limit:
            raise UsageError(
                f"{path}: there are more than {limit:,} packets, too many to take one by one: use rates in bins, or "
                "cut the capture with 'editcap -A START -B STOP'"
            )
    return merge(parts, offsets_ns)
