"""Socket filters for the packet ring: a plain cut, or what libpcap makes of a filter expression."""

from __future__ import annotations

import ctypes
import ctypes.util
import socket
import struct

_SO_ATTACH_FILTER = 26
_RETURN_CONSTANT = 0x06
_OPTIMIZE, _NO_NETMASK = 1, 0xFFFFFFFF


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint), ("instructions", ctypes.c_void_p))


def find_libpcap() -> str:
    """Name of libpcap's shared library; empty where there is none."""
    return ctypes.util.find_library("pcap") or ""


def cut(snap_bytes: int) -> bytes:
    """A program that takes every packet and keeps so many bytes of it."""
    return struct.pack("=HBBI", _RETURN_CONSTANT, 0, 0, snap_bytes)


def compile_filter(words: str, linktype: int, snap_bytes: int) -> bytes:
    """The program for a filter expression (pcap-filter(7)).

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
    """Have the kernel run a program on every packet of a socket.

    Raises:
        OSError: the kernel refuses it.
    """
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    ring.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
