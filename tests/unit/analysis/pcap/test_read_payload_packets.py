"""TCP segments of captures: what tcpdump wrote, read as tcpdump reads it."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from ringtap.analysis.pcap import read_payload_packets
from ringtap.analysis.pcap.read_payload_packets import read_segments
from ringtap.core.errors import MeasurementError, UsageError
from tests.unit.agent_processes import wait_for

pytestmark = [pytest.mark.computes, pytest.mark.together]

GOLD = Path(__file__).resolve().parents[3] / "gold" / "loopback.pcap"
MAC = bytes(12)
END = r"(\S+?)(?:\.(\d+))?"
# the ports stand with the addresses, or behind IPv6's further headers
LINE = re.compile(rf"([0-9.]+) .*IP6? {END} > {END}: (?:.*?(\d+) > (\d+): )?Flags .* length (\d+)")


Ends = tuple[str, int, str, int]


def as_tcpdump_reads(path: Path) -> list[tuple[int, Ends, int]]:
    """Every TCP packet with payload by tcpdump's own account: time in ns, ends, payload."""
    command = ["tcpdump", "-r", str(path), "-nn", "-tt", "--nano"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for line in (line for line in text.splitlines() if "Flags" in line):
        match = LINE.match(line)
        assert match, line
        seconds, part = match[1].split(".")
        ends = match[2], int(match[3] or match[6]), match[4], int(match[5] or match[7])
        if int(match[8]):
            found.append((int(seconds) * 10**9 + int(part), ends, int(match[8])))
    return found


def tcp(payload: int, options: int = 12) -> bytes:
    offset = (20 + options) // 4 << 4
    return struct.pack(">HHIIBBHHH", 40000, 5001, 1, 1, offset, 0x10, 500, 0, 0) + b"\x01" * options + bytes(payload)


def ipv4(inner: bytes, total: int | None = None, protocol: int = 6, fragment: int = 0x4000, options: int = 0) -> bytes:
    total = 20 + options + len(inner) if total is None else total
    ends = ip_address("10.0.0.1").packed + ip_address("10.0.0.2").packed
    first = 0x40 + 5 + options // 4
    return struct.pack(">BBHHHBBH", first, 0, total, 0, fragment, 64, protocol, 0) + ends + b"\x01" * options + inner


def ipv6(inner: bytes, following: int = 6, length: int | None = None) -> bytes:
    ends = ip_address("fd00::1").packed + ip_address("fd00::2").packed
    return struct.pack(">IHBB", 6 << 28, len(inner) if length is None else length, following, 64) + ends + inner


def ethernet(inner: bytes, protocol: int = 0x0800, tags: bytes = b"") -> bytes:
    return MAC + tags + struct.pack(">H", protocol) + inner


def pcap(
    path: Path, frames: list[bytes], linktype: int = 1, order: str = "<", nano: bool = False, kept: int = 65535,
    longer: int = 0,
) -> Path:  # fmt: skip
    """A capture, a packet a second; ``longer``: how much longer than here each frame was on its link."""
    data = struct.pack(f"{order}IHHiIII", 0xA1B23C4D if nano else 0xA1B2C3D4, 2, 4, 0, 0, kept, linktype)
    for number, frame in enumerate(frames):
        head = struct.pack(f"{order}IIII", 1_700_000_000 + number, 7, len(frame[:kept]), len(frame) + longer)
        data += head + frame[:kept]
    path.write_bytes(data)
    return path


def payloads(path: Path) -> list[int]:
    return [size for _, _, size in read_segments(path)]


SEGMENT = (1_700_000_000_000_007_000, ("10.0.0.1", 40000, "10.0.0.2", 5001), 100)
SIX = (SEGMENT[0], ("fd00::1", 40000, "fd00::2", 5001), 100)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("nano", [False, True])
def test_both_clocks_and_byte_orders(tmp_path: Path, order: str, nano: bool) -> None:
    path = pcap(tmp_path / "c.pcap", [ethernet(ipv4(tcp(100)))], order=order, nano=nano)
    expected = (1_700_000_000_000_000_007, *SEGMENT[1:]) if nano else SEGMENT
    assert list(read_segments(path)) == [expected]


@pytest.mark.parametrize(
    ("linktype", "head", "inner"),
    [
        (0, struct.pack("<I", 2), ipv4(tcp(100))),
        (0, struct.pack("<I", 30), ipv6(tcp(100))),
        (108, struct.pack(">I", 2), ipv4(tcp(100))),
        (101, b"", ipv4(tcp(100))),
        (101, b"", ipv6(tcp(100))),
        (228, b"", ipv4(tcp(100))),
        (113, bytes(14) + b"\x08\x00", ipv4(tcp(100))),
        (113, bytes(14) + b"\x86\xdd", ipv6(tcp(100))),
        (276, b"\x08\x00" + bytes(18), ipv4(tcp(100))),
        (276, b"\x86\xdd" + bytes(18), ipv6(tcp(100))),
    ],
)
def test_link_types(tmp_path: Path, linktype: int, head: bytes, inner: bytes) -> None:
    path = pcap(tmp_path / "c.pcap", [head + inner], linktype)
    assert list(read_segments(path)) == [SIX if inner[0] >> 4 == 6 else SEGMENT]


HOP_BY_HOP = b"\x06\x00" + bytes(6)
ROUTING_OF_24 = b"\x06\x02" + bytes(22)
FIRST_FRAGMENT = b"\x06\x00\x00\x01" + bytes(4)
AUTHENTICATION_OF_16 = b"\x06\x02" + bytes(14)


@pytest.mark.parametrize(
    "frame",
    [
        ethernet(ipv4(tcp(100), options=8)),
        ethernet(ipv4(tcp(100, options=0))),
        ethernet(ipv4(tcp(100)) + bytes(4)),  # padding is no payload
        ethernet(ipv4(tcp(100)), tags=b"\x81\x00\x00\x05"),
        ethernet(ipv4(tcp(100)), tags=b"\x88\xa8\x00\x05\x81\x00\x00\x06"),
        ethernet(ipv4(tcp(100), fragment=0x2000)),
        ethernet(ipv6(tcp(100)), 0x86DD),
        ethernet(ipv6(HOP_BY_HOP + tcp(100), 0), 0x86DD),
        ethernet(ipv6(ROUTING_OF_24 + tcp(100), 43), 0x86DD),
        ethernet(ipv6(FIRST_FRAGMENT + tcp(100), 44), 0x86DD),
        ethernet(ipv6(AUTHENTICATION_OF_16 + tcp(100), 51), 0x86DD),
        ethernet(ipv6(b"\x3c\x00" + bytes(6) + HOP_BY_HOP + tcp(100), 0), 0x86DD),
        ethernet(ipv6(tcp(100)), 0x86DD, tags=b"\x81\x00\x00\x05"),
    ],
)
def test_headers_before_the_payload(tmp_path: Path, frame: bytes) -> None:
    path = pcap(tmp_path / "c.pcap", [frame])
    expected = SIX if b"\x86\xdd" in frame[:20] else SEGMENT
    assert list(read_segments(path)) == as_tcpdump_reads(path) == [expected]


def test_payload_that_was_not_kept_counts(tmp_path: Path) -> None:
    path = pcap(tmp_path / "c.pcap", [ethernet(ipv4(tcp(1448))), ethernet(ipv6(tcp(1428)), 0x86DD)], kept=96)
    assert payloads(path) == [1448, 1428]


@pytest.mark.parametrize(
    "frame",
    [
        ethernet(ipv4(tcp(100), total=0)),
        ethernet(ipv6(tcp(100), length=0), 0x86DD),
        ethernet(ipv6(b"\x06\x00\xc2\x04" + bytes(4) + tcp(100), 0, length=0), 0x86DD),
    ],
)
def test_big_tcp_has_its_length_from_the_frame(tmp_path: Path, frame: bytes) -> None:
    path = pcap(tmp_path / "c.pcap", [frame], longer=200_000)
    assert payloads(path) == [200_100]


def test_what_is_no_segment_is_left_out(tmp_path: Path) -> None:
    later = b"\x06\x00\x00\x08" + bytes(4)
    others = [
        ethernet(bytes(28), 0x0806),
        ethernet(ipv4(bytes(50), protocol=17)),
        ethernet(ipv6(bytes(50), 17), 0x86DD),
        ethernet(ipv6(b"", 59), 0x86DD),
    ]
    unreadable = [
        ethernet(ipv4(tcp(100)))[:40],
        ethernet(b"")[:13],
        b"",
        ethernet(ipv4(tcp(100), fragment=0x0010)),
        ethernet(ipv6(later + bytes(100), 44), 0x86DD),
        ethernet(ipv4(tcp(0), total=30)),
    ]
    assert payloads(pcap(tmp_path / "c.pcap", [*others, *unreadable, ethernet(ipv4(tcp(100)))])) == [100]


def test_later_fragments_count_to_the_segment_of_their_first(tmp_path: Path) -> None:
    first, later = ipv4(tcp(100), fragment=0x2000), ipv4(bytes(64), fragment=0x0011)
    assert payloads(pcap(tmp_path / "c.pcap", [ethernet(first), ethernet(later)])) == [100, 64]


def test_more_connections_than_are_usually_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_payload_packets, "MAX_CONVERSATIONS", 3)
    port = [struct.pack(">H", 1000 + number % 40) for number in range(120)]
    path = pcap(tmp_path / "c.pcap", [ethernet(ipv4(one + tcp(100)[2:])) for one in port])
    assert [ends[1] for _, ends, _ in read_segments(path)] == [1000 + number % 40 for number in range(120)]


def test_a_torn_end_is_said(tmp_path: Path) -> None:
    path = pcap(tmp_path / "c.pcap", [ethernet(ipv4(tcp(size))) for size in (100, 200, 300)])
    whole = path.read_bytes()
    for cut in (1, 300, 360, 381):
        path.write_bytes(whole[:-cut])
        with pytest.raises(MeasurementError, match=r"ends within packet 3: .* the 2 packets before it"):
            payloads(path)
    path.write_bytes(whole[:-382])
    assert payloads(path) == [100, 200]


def test_packets_across_the_reader_s_chunks(tmp_path: Path) -> None:
    sizes = [(number * 7919) % 1400 for number in range(3000)]
    path = pcap(tmp_path / "c.pcap", [ethernet(ipv4(tcp(size))) for size in sizes])
    assert path.stat().st_size > 2**21
    assert payloads(path) == [size for size in sizes if size]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\xd4\xc3\xb2\xa1", "is not a capture: it is too short"),
        (b"start,destination\n" * 5, "is not a capture"),
        (b"\x0a\x0d\x0d\x0a" + bytes(60), "is not a capture"),
        (struct.pack("<IHHiIIIIIII", 0xA1B2C3D4, 2, 4, 0, 0, 99, 105, 0, 0, 5, 5) + bytes(5), "link type 105, which"),
        (struct.pack("<IHHiIIIIIII", 0xA1B2C3D4, 2, 4, 0, 0, 99, 1, 0, 0, 2**31, 5), "damaged: "),
    ],
)
def test_what_is_no_capture_is_said_in_a_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "c.pcap"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=words):
        list(read_segments(path))


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        next(read_segments(tmp_path / "c.pcap"))


def test_a_capture_kept_here_reads_as_when_it_was_made() -> None:
    """Two connections over loopback, IPv4 with 1,000 and 200,000 bytes; tcpdump kept 96 bytes a packet."""
    read = list(read_segments(GOLD))
    assert read == as_tcpdump_reads(GOLD)
    assert sum(size for _, ends, size in read if ends[3] == 5001) == 201_000
    assert {ends[0] for _, ends, _ in read} == {"127.0.0.1"}


@contextlib.contextmanager
def tcpdump(path: Path, port: int, *options: str) -> Iterator[None]:
    command = ["tcpdump", "-w", str(path), "-U", "--immediate-mode", "-s", "128", *options, "tcp", "port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        while line and "listening on" not in line:
            line = process.stderr.readline()
        assert line, "tcpdump did not start"
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)


def captured_bytes(path: Path) -> int:
    """Payload in a capture that is still being written."""
    size_bytes = 0
    with contextlib.suppress(MeasurementError, UsageError):
        for _, _, size in read_segments(path):
            size_bytes += size
    return size_bytes


@pytest.mark.needs_root("capture packets of lo")
@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("127.0.0.1", ["-i", "lo"]),
        ("::1", ["-i", "lo", "--time-stamp-precision", "nano"]),
        ("127.0.0.1", ["-i", "any", "-y", "LINUX_SLL2"]),
        ("::1", ["-i", "any", "-y", "LINUX_SLL"]),
    ],
)
def test_bytes_sent_over_loopback_are_the_payload_captured(tmp_path: Path, host: str, options: list[str]) -> None:
    path = tmp_path / "c.pcap"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with tcpdump(path, port, *options), socket.create_connection((host, port)) as client:
            sender_port = client.getsockname()[1]
            receiver, _ = server.accept()
            with receiver:
                client.sendall(bytes(300_000))
                assert len(receiver.recv(300_000, socket.MSG_WAITALL)) == 300_000
                receiver.sendall(b"got it")
                assert client.recv(100) == b"got it"
            wait_for(lambda: captured_bytes(path) >= 300_006, 60)
    read = list(read_segments(path))
    payload = {sender_port: 0, port: 0}
    for _, ends, size in read:
        payload[ends[1]] += size
    assert payload == {sender_port: 300_000, port: 6}
    assert {(ends[0], ends[2]) for _, ends, _ in read} == {(host, host)}
    assert all(abs(time_ns - time.time_ns()) < 60e9 for time_ns, _, _ in read)
    assert read == as_tcpdump_reads(path)
