"""Generates captures, in a separate program so that the memory of NumPy does not count as that of a reader.

python benchmarks/_pcap_file.py FILE PACKETS

There are 1,000 flows, 950 of TCP and 50 of UDP, each between two of 64 hosts: bursts of 12 packets on average, 55 % of
them with 1,448 bytes of payload, 15 % with any smaller number, 30 % acknowledgements of the other side. TCP's sequence
numbers are consistent. The times are those of a link of 10 Gbit/s that is idle a third of the time. The file repeats a
pattern of up to a million packets, with continuing times and TCP numbers. 96 bytes of a packet are kept. The last line
contains the number of packets and the bytes on the wire.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATTERN_PACKETS = 1_000_000
FLOWS, HOSTS, SNAP_BYTES = 1000, 64, 96
_UDP_FLOWS = 50
_START_S = 1_700_000_000
_FULL, _HEADERS = 1448, 14 + 20 + 32  # TCP with timestamps
_BURST, _BIT_NS, _BUSY = 12, 0.1, 2 / 3
_RECORD, _REST = 16 + SNAP_BYTES, SNAP_BYTES - 66  # bytes of a record, and those of it behind the headers

Bytes = npt.NDArray[np.uint8]


class Pattern:
    """A block of packets of all flows, which can be repeated with continuing times and TCP numbers.

    Args:
        packets: number of packets.
    """

    def __init__(self, packets: int) -> None:
        rng = np.random.default_rng(1)
        flow = np.repeat(rng.integers(0, FLOWS, packets), rng.geometric(1 / _BURST, packets))[:packets]
        is_udp = flow < _UDP_FLOWS
        kind = rng.random(packets)
        self._back = (kind < 0.3) & ~is_udp
        payload = np.where(kind < 0.85, _FULL, rng.integers(1, _FULL, packets))
        payload[self._back] = 0
        length = payload + np.where(is_udp, 42, _HEADERS)
        gaps = length * 8 * _BIT_NS / _BUSY * rng.exponential(1, packets)
        self._times_ns = np.cumsum(gaps).astype(np.int64)
        self.span_ns = int(self._times_ns[-1]) + 1000
        self.packets, self.bytes = packets, int(length.sum())
        self._sent = _before(flow, payload)  # bytes of a flow before each packet
        self._sent_all = np.bincount(flow, payload, FLOWS).astype(np.int64)[flow]
        self._first = rng.integers(0, 2**32, FLOWS)[flow]
        self._join(_records(flow, is_udp, self._back, payload, length, rng), np.minimum(length, SNAP_BYTES), is_udp)

    def _join(self, records: Bytes, kept: npt.NDArray[Any], is_udp: npt.NDArray[np.bool_]) -> None:
        """Join the records, and store the positions of their changing fields."""
        self._data = records[np.arange(_RECORD) < 16 + kept[:, None]]
        at = np.concatenate(([0], np.cumsum(16 + kept)[:-1]))
        self._time_at, self._tcp = at, ~is_udp
        self._number_at = at[self._tcp] + 16 + 14 + 20 + 4

    def repeated(self, turn: int) -> Bytes:
        """Return the pattern in its repetition number ``turn``, from 0."""
        times_ns = self._times_ns + turn * self.span_ns
        seconds = _START_S + times_ns // 1_000_000_000
        self._put(self._time_at, np.stack([seconds, times_ns % 1_000_000_000], 1).astype("<u4").view(np.uint8))
        sent = self._first + self._sent + turn * self._sent_all
        numbers = np.where(self._back, 1, sent), np.where(self._back, sent, 1)
        both = np.stack([number[self._tcp] % 2**32 for number in numbers], 1)
        self._put(self._number_at, both.astype(">u4").view(np.uint8))
        return self._data

    def _put(self, at: npt.NDArray[Any], values: Bytes) -> None:
        for offset in range(values.shape[1]):
            self._data[at + offset] = values[:, offset]


def _before(flow: npt.NDArray[Any], payload: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return, for each packet, the payload of the earlier packets of its flow."""
    order = np.argsort(flow, kind="stable")
    through = np.cumsum(payload[order]) - payload[order]
    begins = np.concatenate(([0], np.flatnonzero(np.diff(flow[order])) + 1))
    counts = np.diff(np.append(begins, len(flow)))
    made = np.empty(len(flow), np.int64)
    made[order] = through - np.repeat(through[begins], counts)
    return made


def _records(
    flow: npt.NDArray[Any],
    is_udp: npt.NDArray[np.bool_],
    back: npt.NDArray[np.bool_],
    payload: npt.NDArray[Any],
    length: npt.NDArray[Any],
    rng: np.random.Generator,
) -> Bytes:
    """Return one row per packet: the record header, and the kept bytes of Ethernet, IPv4 and TCP or UDP."""
    a, hop = rng.integers(0, HOSTS, FLOWS), rng.integers(1, HOSTS, FLOWS)
    ports = np.arange(FLOWS) + 20_000
    ends = np.stack([a, (a + hop) % HOSTS])[:, flow]
    source, destination = np.where(back, ends[::-1], ends)
    head: dict[str, tuple[str, Any]] = {
        "time": ("<u8", 0),
        "kept": ("<u4", np.minimum(length, SNAP_BYTES)),
        "length": ("<u4", length),
        "macs": (">u8", 0x0200_0000_0002_0200),
        "mac": (">u4", 1),
        "ethertype": (">u2", 0x0800),
        "version": (">u2", 0x4500),
        "total": (">u2", length - 14),
        "id": (">u4", 0x4000),
        "ttl": ("u1", 64),
        "protocol": ("u1", np.where(is_udp, 17, 6)),
        "sum": (">u2", 0),
        "source": (">u4", 0x0A00_0001 + source),
        "destination": (">u4", 0x0A00_0001 + destination),
        "source_port": (">u2", np.where(back, 5001, ports[flow])),
        "destination_port": (">u2", np.where(back, ports[flow], 5001)),
        # sequence number of TCP; length and checksum of UDP
        "number": (">u4", np.where(is_udp, (payload + 8) << 16, 0)),
        "acknowledged": (">u4", 0),
        "flags": (">u2", 0x8010),
        "window": (">u2", 501),
        "sum2": (">u4", 0),
        "options": (">u4", 0x0101_080A),
        "stamps": (">u8", 1),
    }
    made = np.zeros(len(flow), [*((name, kind) for name, (kind, _) in head.items()), ("rest", f"V{_REST}")])
    for name, (_, values) in head.items():
        made[name] = values
    return made.view(np.uint8).reshape(-1, _RECORD)


def main() -> None:
    """Run the command line above."""
    path, packets = Path(sys.argv[1]), int(sys.argv[2])
    pattern = Pattern(min(packets, PATTERN_PACKETS))
    turns = -(-packets // pattern.packets)
    with path.open("wb") as file:
        header = np.array([0xA1B23C4D, 2 | 4 << 16, 0, 0, SNAP_BYTES, 1], "<u4")  # in nanoseconds
        file.write(header.tobytes())
        for turn in range(turns):
            pattern.repeated(turn).tofile(file)
    print(json.dumps({"packets": turns * pattern.packets, "bytes": turns * pattern.bytes}))


if __name__ == "__main__":
    main()
