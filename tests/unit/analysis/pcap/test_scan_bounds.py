"""The kernels read nothing beyond what was captured: blocks end where memory that may not be read begins."""

import ctypes
import mmap
import random
import struct

import pytest

from ringtap.analysis.pcap.scan import Scan
from tests.unit import capture_makers as make
from tests.unit.capture_makers import A4, B4, Blocks, classic, ethernet, frames, modern, spaced, usual, vxlan

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

PAGES = 64


@pytest.fixture(scope="module")
def guarded():
    """Puts bytes before a page that may not be read; reading on ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, (PAGES + 1) * page)
    hold = ctypes.c_char.from_buffer(area)
    address = ctypes.addressof(hold)
    assert libc.mprotect(ctypes.c_void_p(address + PAGES * page), ctypes.c_size_t(page), 0) == 0

    def put(data: bytes) -> memoryview:
        end = PAGES * page
        area[end - len(data) : end] = data
        return memoryview(area)[end - len(data) : end]

    yield put
    libc.mprotect(ctypes.c_void_p(address + PAGES * page), ctypes.c_size_t(page), 3)
    del hold


def packets() -> list[tuple[int, bytes]]:
    """Frames of every kind with their link types."""
    wraps = {
        make.ETHERNET: [ethernet, make.vlan(0x8100), make.vlan(0x88A8, 0x8100)],
        make.SLL: [make.cooked],
        make.SLL2: [make.cooked2],
        make.RAW: [make.bare],
        make.NULL: [make.null("<")],
        make.IPOIB: [make.ipoib],
    }
    inner = [*usual()[:12], *usual()[-6:]]
    ips = [ip for _, ip in inner]
    ips += [make.roce(A4, B4, opcode, 17, 1, 9, bytes(28)) for opcode in (4, 0x0A, 0x11, 0x13, 0x51, make.CNP)]
    ips += [vxlan(ethernet(ip)) for ip in ips[:3]]
    return [(link, wrap(ip)) for link, ways in wraps.items() for wrap in ways for ip in ips]


def test_packets_cut_anywhere(guarded):
    for number, (link, data) in enumerate(packets()[::8]):
        for size in range(number % 3, min(len(data), 120), 3):
            scan = Scan()
            scan.feed(guarded(classic([make.Packet(make.START_NS, data[:size], len(data))], link)))
            assert scan.finish().counts["packets"] == 1


def test_packets_of_noise(guarded):
    chance = random.Random(5)
    every = packets()
    for _ in range(700):
        link, data = chance.choice(every)
        noisy = bytearray(data[: chance.randrange(1, len(data) + 1)])
        for _ in range(chance.randrange(1, 6)):
            noisy[chance.randrange(len(noisy))] = chance.choice((0, 1, 4, 6, 15, 17, 43, 44, 60, 127, 128, 255))
        record = struct.pack("<IIII", 1, 0, len(noisy), len(data)) + noisy
        scan = Scan()
        scan.feed(guarded(classic([], link) + record))
        assert scan.finish().counts["packets"] == 1


def test_files_of_noise(guarded):
    chance = random.Random(6)
    some = frames(spaced([ip for _, ip in usual()[:20]]))
    files = [classic(some), modern(some), Blocks(">").interface(resolution=9, name="eth0").unknown().bytes()]
    for _ in range(400):
        data = bytearray(chance.choice(files))
        for _ in range(chance.randrange(1, 8)):
            at = chance.randrange(24, len(data) - 4)
            data[at : at + 4] = struct.pack("<I", chance.choice((0, 1, 3, 6, 12, 16, 255, 65_536, 2**31, 2**32 - 1)))
        scan = Scan()
        scan.feed(guarded(bytes(data[: chance.randrange(30, len(data) + 1)])))
        assert min(scan.finish().counts.values()) >= 0
