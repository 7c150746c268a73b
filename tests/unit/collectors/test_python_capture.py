"""The ring's filters and its refusals; tests/testbed/test_collect_packets.py has it capture."""

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.collectors import python_capture

pytestmark = pytest.mark.shares


def kept(code: bytes, packet: bytes) -> int | None:
    """Bytes of a datagram that a socket with this filter receives; None: it does not come."""
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with receiver, sender:
        python_capture.attach(receiver, code)
        sender.send(packet)
        receiver.setblocking(False)
        try:
            return len(receiver.recv(65536))
        except BlockingIOError:
            return None


def frame(port: int) -> bytes:
    """Ethernet, IPv4 and TCP headers with 200 bytes behind them."""
    ethernet = bytes(12) + b"\x08\x00"
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 240, 0, 0, 64, 6, 0, bytes(4), bytes(4))
    return ethernet + ip + struct.pack(">HHIIBBHHH", 1234, port, 0, 0, 0x50, 0x10, 0, 0, 0) + bytes(200)


def test_the_kernel_cuts_packets_to_the_snap_length() -> None:
    assert kept(python_capture.cut(128), bytes(1000)) == 128
    assert kept(python_capture.cut(128), bytes(60)) == 60


@pytest.mark.skipif(not python_capture.find_libpcap(), reason="needs libpcap")
def test_a_filter_expression_becomes_a_program_of_the_kernel() -> None:
    code = python_capture.compile_filter("tcp port 5001", 1, 128)
    assert kept(code, frame(5001)) == 128
    assert kept(code, frame(5002)) is None
    with pytest.raises(ValueError, match="not understood"):
        python_capture.compile_filter("tcp porto", 1, 128)


def test_without_libpcap_a_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_capture, "find_libpcap", lambda: "")
    with pytest.raises(ValueError, match="needs libpcap"):
        python_capture.compile_filter("tcp", 1, 128)


def test_files_follow_one_another_as_tcpdumps_do(tmp_path: Path) -> None:
    path = tmp_path / "eth0-0.pcap"
    file = python_capture._File(path, 1, 128, limit_bytes=100)
    for _ in range(5):
        file.write(bytes(60))
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eth0-0.pcap", "eth0-0.pcap1", "eth0-0.pcap2"]
    assert [len((tmp_path / f"eth0-0.pcap{end}").read_bytes()) for end in ("", "1", "2")] == [144, 144, 84]
    assert path.read_bytes()[:24] == struct.pack("=IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 128, 1)


def test_errors_are_one_sentence() -> None:
    command = [
        sys.executable,
        "-m",
        "ringtap.collectors.python_capture",
        "--interface",
        "nosuch0",
        "--write",
        os.devnull,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert done.stderr == "ring: No such device\n"
