"""Describes the layout of the kernel's answers about TCP sockets, and of the records made of them.

A record is the sample's two clocks and then slices of the kernel's own bytes: the head of ``inet_diag_msg`` (the
socket's identity), its queues, and ``tcp_info`` without the four ages, which change by themselves. Layouts are those of
linux/inet_diag.h, in the byte order of the machine, and of `ringtap.core.tcp_info`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ringtap.collectors.netlink import HEADER_BYTES, aligned, attribute_head, attributes
from ringtap.core.append_only_logs import Field
from ringtap.core.run_directory_schema import TIME_FIELDS
from ringtap.core.tcp_info import AGES_END, AGES_START, INFO_BYTES, TCP_INFO

BY_FAMILY, COMPATIBLE = 20, 18  # SOCK_DIAG_BY_FAMILY; TCPDIAG_GETSOCK, whose one dump holds both families
_INFO = 2  # INET_DIAG_INFO
_ASK_INFO = 1 << (_INFO - 1)
_TCP = 6
# Established, connecting and closing. LISTEN, SYN-RECEIVED and TIME-WAIT have no useful tcp_info, CLOSE no connection.
_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT, _LAST_ACK, _CLOSING = 1, 2, 4, 5, 8, 9, 11
STATES = sum(
    1 << state for state in (_ESTABLISHED, _SYN_SENT, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT, _LAST_ACK, _CLOSING)
)

IDENTITY_BYTES = 48  # inet_diag_sockid: ports, addresses, interface, cookie
_MESSAGE_BYTES = 72  # inet_diag_msg
_QUEUES_BYTES = 16

FIELDS: tuple[Field, ...] = (
    *TIME_FIELDS,
    Field("family", "<u1", "2: IPv4, 10: IPv6", "index"),
    Field("state", "<u1", "0: vanished, else as in linux/tcp_states.h", "gauge"),
    Field("timer", "<u1", "", "gauge"),
    Field("timer_retransmits", "<u1", "", "gauge"),
    Field("sport", "V2", "network order", "index"),
    Field("dport", "V2", "network order", "index"),
    Field("source", "V16", "IPv4: the first 4 bytes", "index"),
    Field("destination", "V16", "IPv4: the first 4 bytes", "index"),
    Field("interface", "<u4", "index that the socket is bound to, 0: none", "index"),
    Field("cookie", "<u8", "", "index"),
    Field("rqueue", "<u4", "bytes", "gauge"),
    Field("wqueue", "<u4", "bytes", "gauge"),
    Field("uid", "<u4", "", "index"),
    Field("inode", "<u4", "", "index"),
    *(
        Field(name, type_, unit, kind, 8 * int(type_[2]) if kind == "counter" else 0)
        for name, type_, unit, kind, _ in TCP_INFO
    ),
)


def absent_fields(info_bytes: int) -> list[str]:
    """Return the columns that a tcp_info of ``info_bytes`` does not fill; they are 0 in every record."""
    return [name for name, type_, _, _, start in TCP_INFO if start + int(type_[2]) > info_bytes]


def dump_requests(compatible: bool) -> list[bytes]:
    """Return the request bodies for a dump; the compatible one is a single dump for both address families."""
    if compatible:  # inet_diag_req, which asks for no family
        return [struct.pack("=BBBB48xII", 0, 0, 0, _ASK_INFO, STATES, 0)]
    return [struct.pack("=BBBxI48x", family, _TCP, _ASK_INFO, STATES) for family in (2, 10)]


def one_request(family: int, identity: bytes) -> bytes:
    """Return the request body, of type ``BY_FAMILY``, for one socket."""
    return struct.pack("=BBBxI48s", family, _TCP, _ASK_INFO, 0xFFFFFFFF, identity)


@dataclass(frozen=True)
class MessageLayout:
    """Positions of the parts of one kind of message; messages with equal heads have equal layouts.

    ``unpack`` returns: the head (length, type, flags), family to timer_retransmits, identity, queues, the head of the
    tcp_info attribute, tcp_info before the ages, tcp_info after them.

    Attributes:
        unpack: format for consecutive messages.
        unpack_apart: format for messages at multiples of ``apart`` bytes.
        step: bytes from one message to the next.
        info_head: required head of the tcp_info attribute; another one means another layout under an equal head.
        fill: zeros in place of the bytes that a short tcp_info lacks.
    """

    unpack: struct.Struct
    unpack_apart: struct.Struct
    step: int
    info_head: bytes
    fill: bytes


def learn_layout(data: memoryview, position: int, length: int, apart: int) -> MessageLayout | None:
    """Return the layout of the message at ``position``; None if it has no tcp_info, as in TIME-WAIT."""
    begin = HEADER_BYTES + _MESSAGE_BYTES
    end = position + length
    found = [
        (start - position, size)
        for kind, start, size in attributes(data, position + begin, end)
        if kind == _INFO and size >= AGES_END
    ]
    if not found:
        return None
    start, size = found[0]
    kept = min(size, INFO_BYTES)
    ages = AGES_END - AGES_START
    parts = f"=8s8x4s{IDENTITY_BYTES}s4x{_QUEUES_BYTES}s{start - 4 - begin}x4s{AGES_START}s{ages}x{kept - AGES_END}s"
    step, used = aligned(length), start + kept
    apart_layout = struct.Struct(parts + f"{max(0, apart - used)}x")
    return MessageLayout(
        struct.Struct(parts + f"{step - used}x"),
        apart_layout,
        step,
        attribute_head(_INFO, size),
        bytes(INFO_BYTES - kept),
    )
