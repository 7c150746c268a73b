"""Reads the TCP payload of a capture, packet by packet, for ``ringtap traffic plan --kind replay``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ringtap.analysis.pcap.duplicates import copies_note
from ringtap.analysis.pcap.export_scan_tables import flow_columns
from ringtap.analysis.pcap.scan import MAX_CONVERSATIONS
from ringtap.analysis.pcap.scan_captures import LOG, scan_packets
from ringtap.analysis.pcap.scan_dtypes import PLAIN
from ringtap.core.errors import MeasurementError, UsageError

_TCP = 6
_BATCH = 1 << 16  # packets processed together
_ENDS = ("source", "source_port", "destination", "destination_port")


def read_segments(path: Path) -> Iterator[tuple[int, tuple[str, int, str, int], int]]:
    """Yield the TCP packets with payload outside tunnels, in the capture's order.

    Args:
        path: a pcap or pcapng file, plain or packed, as for `read_captures`.

    Yields:
        Time in ns since the epoch; source address and port, destination address and port; payload in bytes. With
        segmentation offload a packet may hold many of the wire's segments.

    Raises:
        UsageError: the file cannot be read, is not a capture, is damaged, or is of a link type that is not read.
        MeasurementError: the file ends within a packet.
    """
    limit = MAX_CONVERSATIONS
    while (scanned := scan_packets(path, limit)).counts["packets_over_limit"]:
        limit *= 8
    counts, conversations = scanned.counts, scanned.conversations
    if counts["corrupt_records"]:
        raise UsageError(f"{path} is damaged: {counts['corrupt_bytes']:,} bytes of it are no packets")
    if counts["torn_bytes"]:
        raise MeasurementError(
            f"{path} ends within packet {counts['packets'] + 1}: the capture was cut off there, and only the "
            f"{counts['packets']} packets before it were read"
        )
    if counts["skipped_link_types"]:
        types = ", ".join(sorted({str(interface["linktype"]) for interface in scanned.interfaces}))
        raise UsageError(
            f"{path} has link type {types}, which is not read here: capture on an Ethernet interface, the loopback "
            "interface or 'any'"
        )
    for note in copies_note(str(path), counts):
        LOG.info(note)
    # without packets inside tunnels and packets without ports
    is_tcp = (conversations["protocol"] == _TCP) & (conversations["layer"] == 0) & (conversations["kind"] == PLAIN)
    table = flow_columns(conversations, np.arange(2 * len(conversations)))
    endpoints = list(zip(*(np.asarray(table[end]).tolist() for end in _ENDS), strict=True))
    is_counted = np.repeat(is_tcp, 2)
    for at in range(0, len(scanned.packets), _BATCH):
        batch = scanned.packets[at : at + _BATCH]
        batch = batch[(batch["payload"] > 0) & is_counted[batch["flow"]]]
        columns = (batch[name].tolist() for name in ("time_ns", "flow", "payload"))
        for time_ns, flow, payload_bytes in zip(*columns, strict=True):
            yield time_ns, endpoints[flow], payload_bytes
