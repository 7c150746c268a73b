"""Sends ethtool requests by ioctl, without privilege: driver, statistics, offloads, rings, pause.

Layouts: linux/ethtool.h. All are read-only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
_DRIVER, _RINGS, _PAUSE, _STRINGS, _STATISTICS, _COUNT_OF_SET, _FEATURES = 0x03, 0x10, 0x12, 0x1B, 0x1D, 0x37, 0x3A
_SET_STATISTICS, _SET_FEATURES = 1, 4
_NAME_BYTES = 32
# a driver whose number of channels grows between two requests writes more than it announced
_SPARE_STATISTICS = 4096


class Ethtool:
    """A socket for ethtool requests; every request raises ``OSError`` if the driver does not support it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _ask(self, nic: str, request: bytearray) -> bytearray:
        buffer = (ctypes.c_char * len(request)).from_buffer(request)
        name = nic.encode()[:15]
        fcntl.ioctl(self._socket, _SIOCETHTOOL, struct.pack("16sP16x", name, ctypes.addressof(buffer)))
        return request

    def value(self, nic: str, command: int) -> int:
        """Return the answer to a request of ``struct ethtool_value``, as those for single offloads are."""
        return int(struct.unpack_from("=I", self._ask(nic, bytearray(struct.pack("=II", command, 0))), 4)[0])

    def driver(self, nic: str) -> dict[str, str]:
        """Return the driver, its version, the firmware version and the bus address."""
        answer = self._ask(nic, bytearray(struct.pack("=I192x", _DRIVER)))
        words = ("driver", "version", "firmware", "bus")
        return {word: _text(answer, 4 + 32 * place) for place, word in enumerate(words)}

    def _count(self, nic: str, which: int) -> int:
        answer = self._ask(nic, bytearray(struct.pack("=IIQ8x", _COUNT_OF_SET, 0, 1 << which)))
        mask, count = struct.unpack_from("=QI", answer, 8)
        return int(count) if mask else 0

    def _names(self, nic: str, which: int) -> list[str]:
        count = self._count(nic, which)
        spare = count + _SPARE_STATISTICS
        answer = self._ask(nic, bytearray(struct.pack("=III", _STRINGS, which, count)) + bytes(spare * _NAME_BYTES))
        (count,) = struct.unpack_from("=I", answer, 8)
        return [_text(answer, 12 + place * _NAME_BYTES) for place in range(count)]

    def statistic_names(self, nic: str) -> list[str]:
        """Return the names of the driver's statistics, in the driver's order."""
        return self._names(nic, _SET_STATISTICS)

    def statistics(self, nic: str, count: int) -> tuple[int, ...]:
        """Return the values of the statistics, in the order of their names.

        Args:
            nic: interface.
            count: number of statistics when the names were read; the answer may have another length.
        """
        request = bytearray(struct.pack("=II", _STATISTICS, count)) + bytes((count + _SPARE_STATISTICS) * 8)
        answer = self._ask(nic, request)
        (count,) = struct.unpack_from("=I", answer, 4)
        return struct.unpack_from(f"={count}Q", answer, 8)

    def features(self, nic: str) -> dict[str, bool]:
        """Return the offloads by the kernel's names (``tx-tcp-segmentation``): True if active."""
        names = self._names(nic, _SET_FEATURES)
        blocks = (len(names) + 31) // 32
        answer = self._ask(nic, bytearray(struct.pack("=II", _FEATURES, blocks)) + bytes(blocks * 16))
        active = [struct.unpack_from("=I", answer, 8 + 16 * block + 8)[0] for block in range(blocks)]
        return {name: bool(active[place // 32] >> place % 32 & 1) for place, name in enumerate(names) if name}

    def rings(self, nic: str) -> dict[str, int]:
        """Return the sizes of the receive and transmit rings, in packets, and the largest possible sizes."""
        answer = self._ask(nic, bytearray(struct.pack("=I32x", _RINGS)))
        rx_most, _, _, tx_most, rx, _, _, tx = struct.unpack_from("=8I", answer, 4)
        return {"rx": rx, "tx": tx, "rx_most": rx_most, "tx_most": tx_most}

    def pause(self, nic: str) -> dict[str, bool]:
        """Return the Ethernet pause parameters: True if autonegotiated, honoured and sent, respectively."""
        answer = self._ask(nic, bytearray(struct.pack("=I12x", _PAUSE)))
        return dict(zip(("autonegotiate", "rx", "tx"), map(bool, struct.unpack_from("=3I", answer, 4)), strict=True))


def _text(data: bytearray, at: int) -> str:
    return bytes(data[at : at + _NAME_BYTES]).split(b"\0", 1)[0].decode(errors="replace").strip()


_OFFLOADS = (
    "tx-tcp-segmentation",
    "tx-tcp6-segmentation",
    "tx-generic-segmentation",
    "tx-udp-segmentation",
    "rx-gro",
    "rx-gro-hw",
    "rx-lro",
    "rx-checksum",
    "tx-checksum-ip-generic",
    "tx-checksum-ipv4",
    "rx-vlan-hw-parse",
)


def offloads(nic: str) -> dict[str, bool]:
    """Return the offloads that determine what a captured packet is; empty if the interface does not report them."""
    ethtool = Ethtool()
    with contextlib.closing(ethtool), contextlib.suppress(OSError):
        features = ethtool.features(nic)
        return {name: features[name] for name in _OFFLOADS if name in features}
    return {}
