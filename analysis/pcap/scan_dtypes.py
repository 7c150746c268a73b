"""Declares the tables of a capture's scan: conversations, rates in bins, RoCE queue pairs.

Fields of shape (2,) are by direction: 0 from ``a`` to ``b``, 1 back. A flow is one direction of a conversation; its
number is twice the conversation's row plus the direction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PLAIN, ROCE, NO_PORTS, PORTS_CUT, TARGET_PORT_CUT, ARP, RARP, ARP_CUT, RARP_CUT, NOT_IP = range(10)
"""Values of ``kind``: RoCEv2 is UDP to port 4791 with a base transport header. NO_PORTS: TCP or UDP packets that
hold no ports, such as later fragments. PORTS_CUT: the capture cut off both ports; TARGET_PORT_CUT: only the
destination's. ARP and RARP: between protocol addresses. ARP_CUT and RARP_CUT: the capture cut off the target's address,
and the sender's too if the row has NO_ADDRESSES. NOT_IP: all other frames, in one row."""

NO_ADDRESSES = 1
"""Value of ``family`` for frames that are not IP, except ARP between IPv4 addresses."""

CONVERSATION = np.dtype(
    [
        ("protocol", "u1"),  # of the IP header
        ("kind", "u1"),
        ("layer", "u1"),  # 1: inside a tunnel, whose own conversation counts the same frames
        ("family", "u1"),  # 4 or 6; 0: the row of all conversations beyond the limit
        ("a_port", "u2"),
        ("b_port", "u2"),
        ("a", "V16"),  # sender of the first packet; IPv4 in the first four bytes
        ("b", "V16"),
        ("packets", "u8", (2,)),
        ("bytes", "u8", (2,)),  # frame bytes on the wire, before the capture cut any
        ("payload", "u8", (2,)),
        ("data_packets", "u8", (2,)),  # those with payload
        ("data_bytes", "u8", (2,)),
        ("segments", "u8", (2,)),  # segments on the wire; one captured packet may hold several
        ("retransmitted_bytes", "u8", (2,)),
        ("repeated_bytes", "u8", (2,)),  # payload that an earlier packet held, too
        ("out_of_order_bytes", "u8", (2,)),
        ("zero_windows", "u8", (2,)),
        ("resets", "u8", (2,)),
        ("rtt_count", "u8", (2,)),
        ("rtt_sum_ns", "i8", (2,)),  # from data of that direction to its acknowledgement, at the capture point
        ("rtt_min_ns", "i8", (2,)),  # -1: none
        ("handshake_ns", "i8"),  # -1: not seen
        ("first_ns", "i8"),  # -1: no packet of the capture has a time
        ("last_ns", "i8"),
    ]
)

CELL = np.dtype(
    [
        ("bin", "i8"),
        ("flow", "u4"),
        ("packets", "u2"),
        ("data_packets", "u2"),
        ("bytes", "u4"),
        ("data_bytes", "u4"),
        ("payload", "u4"),
    ]
)
"""Amounts of a flow in one bin. The fields are narrow, because a busy capture has millions of cells: sum them as int64.
A cell that would overflow is followed by another one of the same flow and bin."""

PACKET = np.dtype([("time_ns", "i8"), ("flow", "u4"), ("bytes", "u4"), ("payload", "u4"), ("repeated_bytes", "u4")])
"""One packet, for uses that need single packets; a packet inside a tunnel has a second row, of the inner flow."""

PICK = np.dtype(
    [
        ("time_ns", "i8"),
        ("number", "u4"),  # of the packet in the capture, from 1
        ("interface", "u4"),  # number of its interface in the capture, from 0
        ("kept", "u4"),  # captured bytes
        ("length", "u4"),  # of the frame on the wire
        ("flow", "u4"),  # plus one; 0: the packet belongs to no flow
        ("payload", "u4"),
        ("inner", "u4"),  # flow inside a tunnel, plus one
        ("inner_payload", "u4"),
    ]
)
"""One packet whose captured bytes are kept, for uses that need the packets themselves."""

QUEUE_PAIR = np.dtype(
    [
        ("family", "u1"),
        ("queue_pair", "u4"),  # of the destination
        ("source", "V16"),
        ("destination", "V16"),
        ("packets", "u8"),
        ("bytes", "u8"),
        ("payload", "u8"),
        ("acknowledgements", "u8"),
        ("naks", "u8"),
        ("cnps", "u8"),
        ("psn_gaps", "u8"),
        ("psn_repeats", "u8"),
        ("first_ns", "i8"),
        ("last_ns", "i8"),
    ]
)


def is_ip(kind: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return a mask of the kinds that are IP; the others are ARP, RARP and the row of all other frames."""
    return np.asarray(kind < ARP)


def offsets(dtype: np.dtype[Any], *names: str) -> tuple[int, ...]:
    """Return the offsets of fields in a row, in bytes."""
    assert dtype.fields is not None
    return tuple(dtype.fields[name][1] for name in names)
