"""Captures packets in Python, on nodes without tcpdump: ``python -m ringtap.collectors.python_capture``.

The program has tcpdump's signals (INT ends, USR1 prints counts, USR2 flushes) and output lines, so that the same code
controls both. It runs in a process of its own; otherwise the agent would miss samples.

Source: Documentation/networking/packet_mmap.rst and linux/if_packet.h, TPACKET_V3.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from ringtap.core.capture_file_formats import (
    LINK_COOKED,
    LINK_ETHERNET,
    PCAP_HEADER,
    PCAP_NANOSECONDS,
    PCAP_RECORD,
    PCAP_VERSION,
)
from ringtap.core.errors import failure_message
from ringtap.core.terminal_escaping import as_command

_SO_ATTACH_FILTER = 26
_RETURN_CONSTANT = 0x06
_OPTIMIZE, _NO_NETMASK = 1, 0xFFFFFFFF


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint), ("instructions", ctypes.c_void_p))


def find_libpcap() -> str:
    """Return the name of libpcap's shared library; empty if there is none."""
    return ctypes.util.find_library("pcap") or ""


def cut(snap_bytes: int) -> bytes:
    """Return a BPF program that accepts every packet and keeps ``snap_bytes`` of it."""
    return struct.pack("=HBBI", _RETURN_CONSTANT, 0, 0, snap_bytes)


def compile_filter(words: str, linktype: int, snap_bytes: int) -> bytes:
    """Compile a filter expression (pcap-filter(7)) to a BPF program.

    Raises:
        ValueError: libpcap is missing or does not understand the expression.
    """
    name = find_libpcap()
    if not name:
        raise ValueError("a filter needs libpcap, which is not installed: capture without one")
    library = ctypes.CDLL(name)
    library.pcap_open_dead.restype = ctypes.c_void_p
    library.pcap_geterr.restype = ctypes.c_char_p
    library.pcap_geterr.argtypes = library.pcap_close.argtypes = [ctypes.c_void_p]
    pointer = ctypes.POINTER(_Program)
    library.pcap_compile.argtypes = [ctypes.c_void_p, pointer, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint32]
    handle = library.pcap_open_dead(linktype, snap_bytes)
    try:
        program = _Program()
        if library.pcap_compile(handle, ctypes.byref(program), words.encode(), _OPTIMIZE, _NO_NETMASK) != 0:
            raise ValueError(f"the filter is not understood: {library.pcap_geterr(handle).decode(errors='replace')}")
        # a BPF instruction has 8 bytes
        code = ctypes.string_at(program.instructions, program.length * 8)
        library.pcap_freecode(ctypes.byref(program))
        return code
    finally:
        library.pcap_close(handle)


def attach(ring: socket.socket, code: bytes) -> None:
    """Attach a BPF program to a socket, so that the kernel runs it on every packet.

    Raises:
        OSError: the kernel refuses it.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    ring.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


_SOL_PACKET, _RX_RING, _STATISTICS, _VERSION = 263, 5, 6, 10
_TPACKET_V3 = 2
_SIOCGIFHWADDR = 0x8927
_ALL_PROTOCOLS = 0x0003
_OUTGOING = 4
_VLAN_VALID, _VLAN_TPID_VALID = 1 << 4, 1 << 6
_USER = 1
_BLOCK_BYTES = 1 << 20
# time after which a block is handed over even if it is not full
_RETIRE_MS = 100
_FRAME_BYTES = 2048
_ARPHRD_ETHERNET, _ARPHRD_LOOPBACK = 1, 772
_BLOCK = struct.Struct("=II4I")
# next, seconds, nanoseconds, kept, length, status, offsets of frame and of network header, hash, VLAN tag, its type
_PACKET = struct.Struct("=IIIIIIHHIIH")
_HEADER_BYTES = 48
_ADDRESS = struct.Struct("=HHiHBB8s")
_VLAN_DEFAULT = 0x8100


class _File:
    """The capture file; with a limit, the following ones have 1, 2, … appended, as with tcpdump -C."""

    def __init__(self, path: Path, linktype: int, snap_bytes: int, limit_bytes: int) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._header = PCAP_HEADER.pack(PCAP_NANOSECONDS, *PCAP_VERSION, 0, 0, snap_bytes, linktype)
        self._number = self._bytes = 0
        self._open(path)

    def _open(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(self._header)
        self._file.flush()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        """Append complete packets."""
        if self._limit_bytes and self._bytes >= self._limit_bytes:
            self._file.close()
            self._number += 1
            self._open(self._path.with_name(f"{self._path.name}{self._number}"))
        self._file.write(data)
        self._bytes += len(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _hardware(interface: str) -> int:
    """Return the hardware type (ARPHRD_*) of an interface.

    Raises:
        OSError: there is no such interface.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFHWADDR, struct.pack("16s24x", interface.encode()[:15]))
    return int(struct.unpack_from("=H", answer, 16)[0])


class Ring:
    """A ring of blocks that the kernel fills with packets.

    Args:
        interface: the interface to capture on.
        snap_bytes: bytes kept of a packet.
        ring_bytes: size of the ring in the kernel.
        words: filter expression; empty for none.

    Attributes:
        linktype: link type of the returned packets.
        captured: number of returned packets.

    Raises:
        PermissionError: CAP_NET_RAW is missing.
        OSError: there is no such interface, or no memory for the ring.
        ValueError: the filter cannot be used.
    """

    def __init__(self, interface: str, snap_bytes: int, ring_bytes: int, words: str) -> None:
        hardware = _hardware(interface)
        raw = hardware in (_ARPHRD_ETHERNET, _ARPHRD_LOOPBACK)
        self.linktype = LINK_ETHERNET if raw else LINK_COOKED
        # the kernel counts and delivers a loopback packet twice; the outgoing one is left out
        self._loopback = hardware == _ARPHRD_LOOPBACK
        # no protocol before bind(), so that no packets of other interfaces are captured
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW if raw else socket.SOCK_DGRAM, 0)
        code = compile_filter(words, self.linktype, snap_bytes) if words else cut(snap_bytes)
        attach(self._socket, code)
        self._socket.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
        self._blocks = max(2, ring_bytes // _BLOCK_BYTES)
        frames = self._blocks * (_BLOCK_BYTES // _FRAME_BYTES)
        layout = struct.pack("=7I", _BLOCK_BYTES, self._blocks, _FRAME_BYTES, frames, _RETIRE_MS, 0, 0)
        self._socket.setsockopt(_SOL_PACKET, _RX_RING, layout)
        self._map = mmap.mmap(self._socket.fileno(), self._blocks * _BLOCK_BYTES)
        self._next = 0
        self.captured = self._received = self._dropped = 0
        self._socket.bind((interface, _ALL_PROTOCOLS))

    def fileno(self) -> int:
        """Return the file descriptor, for ``poll``."""
        return self._socket.fileno()

    def blocks(self) -> list[bytes]:
        """Return the packets of every ready block, as records of a capture file, and release the blocks."""
        found = []
        for _ in range(self._blocks):
            at = self._next * _BLOCK_BYTES
            _, _, status, count, first, _ = _BLOCK.unpack_from(self._map, at)
            if not status & _USER:
                break
            found.append(self._packets(at + first, count))
            struct.pack_into("=I", self._map, at + 8, 0)
            self._next = (self._next + 1) % self._blocks
        return found

    def _packets(self, at: int, count: int) -> bytes:
        unpack, pack, ring, out = _PACKET.unpack_from, PCAP_RECORD.pack, self._map, list[bytes]()
        skip_outgoing, cooked = self._loopback, self.linktype == LINK_COOKED
        for _ in range(count):
            following, seconds, nanoseconds, kept, length, status, frame_at, _, _, tag, kind = unpack(ring, at)
            begin = at + frame_at
            if skip_outgoing and ring[at + _HEADER_BYTES + 10] == _OUTGOING:
                at += following
                continue
            if status & _VLAN_VALID and kept >= 12 and not cooked:
                kind = kind if status & _VLAN_TPID_VALID else _VLAN_DEFAULT
                out += (pack(seconds, nanoseconds, kept + 4, length + 4), ring[begin : begin + 12])
                out += (struct.pack(">HH", kind, tag & 0xFFFF), ring[begin + 12 : begin + kept])
            elif cooked:
                out += (pack(seconds, nanoseconds, kept + 16, length + 16), self._cooked_header(at + _HEADER_BYTES))
                out.append(ring[begin : begin + kept])
            else:
                out += (pack(seconds, nanoseconds, kept, length), ring[begin : begin + kept])
            self.captured += 1
            at += following
        return b"".join(out)

    def _cooked_header(self, at: int) -> bytes:
        """Return a Linux cooked header (LINKTYPE_LINUX_SLL) from the packet's socket address."""
        _, protocol, _, hardware, direction, size, address = _ADDRESS.unpack_from(self._map, at)
        return struct.pack(">HHH8s", direction, hardware, min(size, 8), address) + struct.pack("=H", protocol)

    def counts(self) -> tuple[int, int, int]:
        """Return packets captured, received by the filter (with the dropped ones), and dropped by the full ring."""
        # reading resets the kernel's counts
        received, dropped, _ = struct.unpack("=3I", self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 12))
        self._received += received
        self._dropped += dropped
        return self.captured, self._received, self._dropped

    def close(self) -> None:
        """Release the ring."""
        self._map.close()
        self._socket.close()


def _say(counts: tuple[int, int, int], between: str) -> None:
    captured, received, dropped = counts
    parts = (f"{captured} packets captured", f"{received} packets received by filter")
    print(between.join((*parts, f"{dropped} packets dropped by kernel")), file=sys.stderr, flush=True)


def _capture(ring: Ring, file: _File) -> None:
    """Write packets until SIGINT or SIGTERM, at most ``_RETIRE_MS`` after their arrival."""
    words: set[int] = set()
    alarm, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: words.add(number))
    poll = select.poll()
    poll.register(ring, select.POLLIN)
    poll.register(alarm, select.POLLIN)
    while True:
        poll.poll()
        for packets in ring.blocks():
            file.write(packets)
        if not words:
            continue
        os.read(alarm, 4096)
        told, words = words, set()
        if {signal.SIGINT, signal.SIGTERM} & told:
            time.sleep(2 * _RETIRE_MS / 1000)  # until the kernel hands over the last block
            for packets in ring.blocks():
                file.write(packets)
        if {signal.SIGUSR2, signal.SIGINT, signal.SIGTERM} & told:
            file.flush()
        if signal.SIGUSR1 in told:
            _say(ring.counts(), ", ")
        if {signal.SIGINT, signal.SIGTERM} & told:
            return


def main(arguments: list[str] | None = None) -> int:
    """Run a capture from the command line; return 0, or 1 with a message on standard error."""
    parser = argparse.ArgumentParser(prog="ring", description="Capture packets to a pcap file, in Python alone.")
    parser.add_argument("--interface", required=True)
    parser.add_argument("--write", required=True, type=Path)
    parser.add_argument("--snap-bytes", type=int, default=128)
    parser.add_argument("--ring-bytes", type=int, default=64 << 20)
    parser.add_argument("--file-bytes", type=int, default=0)
    parser.add_argument("filter", nargs="?", default="")
    options = parser.parse_args(arguments)
    try:
        ring = Ring(options.interface, options.snap_bytes, options.ring_bytes, options.filter)
        file = _File(options.write, ring.linktype, options.snap_bytes, options.file_bytes)
        print(
            f"ring: listening on {options.interface}, snapshot length {options.snap_bytes}", file=sys.stderr, flush=True
        )
        try:
            _capture(ring, file)
        finally:
            _say(ring.counts(), "\n")
            file.close()
            ring.close()
    except (OSError, ValueError) as error:
        print(f"ring: {failure_message(error)}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
