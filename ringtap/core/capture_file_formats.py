"""Declares the formats of capture files: magic numbers, headers, kinds of blocks, and link types.

Sources: draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng and tcpdump.org/linktypes.html.
"""

from __future__ import annotations

import struct

PCAP_NANOSECONDS = 0xA1B23C4D
PCAP_MAGICS = {
    struct.pack(f"{order}I", magic): (order, tick_ns)
    for magic, tick_ns in ((0xA1B2C3D4, 1000), (PCAP_NANOSECONDS, 1))
    for order in "<>"
}
"""First bytes of a pcap file, and what they say: its byte order and the nanoseconds per tick of its times."""
PCAP_VERSION = (2, 4)
PCAP_HEADER = struct.Struct("=IHHiIII")
"""Magic number, version, time zone, accuracy, snap length, link type; in the order of the machine that captured."""
PCAP_RECORD = struct.Struct("=IIII")
"""Seconds, ticks, captured bytes, bytes on the wire; before each packet."""

SECTION_HEADER, BYTE_ORDER, PCAPNG_VERSION = 0x0A0D0D0A, 0x1A2B3C4D, (1, 0)
INTERFACE_BLOCK, PACKET_BLOCK, SIMPLE_BLOCK, STATISTICS_BLOCK, ENHANCED_BLOCK = 1, 2, 3, 5, 6
CAPTURE_MAGICS = (*PCAP_MAGICS, struct.pack("<I", SECTION_HEADER))
"""First bytes of the captures that are read; those of pcapng are the same in both byte orders."""

LINK_NULL, LINK_ETHERNET, LINK_LOOP, LINK_COOKED, LINK_IPOIB, LINK_COOKED2 = 0, 1, 108, 113, 242, 276
LINK_RAW_BSD, LINK_RAW_OTHER, LINK_RAW, LINK_IPV4, LINK_IPV6 = 12, 14, 101, 228, 229
"""Link types of frames; those of the second line begin with the IP header."""
