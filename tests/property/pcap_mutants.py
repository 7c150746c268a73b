"""Damaged captures by the number, and what must hold of each; run in a process of its own, for it may crash that.

python -m tests.property.pcap_mutants SEED FIRST COUNT PROGRESS

Mutant N of a seed is the same in every run. With FIRST 0, every frame that they are made from is also cut at every
length. PROGRESS is a file of eight bytes that holds the number in work, -1 for those frames. Every block is laid right
before a page that cannot be read, so that reading one byte too many is a crash. The last line is one JSON object; its
list "broken" names the mutants that break a rule.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ringtap.analysis.pcap.scan import Scan, Scanned
from ringtap.analysis.pcap.scan_dtypes import CELL, CONVERSATION
from ringtap.core.errors import UsageError
from tests.unit.analysis.pcap.test_scan_beside_tshark import KINDS
from tests.unit.capture_makers import START_NS, Blocks, Packet, classic, ethernet, frames, usual

MAX_S = 20  # for one mutant, which takes less than a thousandth of that where nothing hangs
MAX_GROWTH_BYTES = 200_000_000
_MAX_CUT_BYTES = 200  # behind it lies payload
LINKS = (0, 1, 12, 14, 101, 108, 113, 228, 229, 242, 276, 105, 147)  # the last two are not read
_WORDS = (0, 1, 2, 3, 4, 7, 8, 16, 19, 20, 40, 60, 0x7FFF, 0x8000, 0xFFFF, 262144, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_M_MMAP_THRESHOLD = -3


class Guarded:
    """Memory whose last byte lies right before a page that cannot be read."""

    def __init__(self, size: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        # a scan's tables come as zeroed pages and go back, here thousands of times: malloc would keep and clear them
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = self._size + mmap.PAGESIZE
        base = libc.mmap(None, whole, _PROT_READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert base not in (None, ctypes.c_void_p(-1).value)
        self._end = base + self._size
        assert libc.mprotect(self._end, mmap.PAGESIZE, _PROT_NONE) == 0

    def hold(self, data: bytes) -> memoryview:
        """A copy that ends where the memory ends."""
        assert len(data) <= self._size
        ctypes.memmove(self._end - len(data), data, len(data))
        return memoryview((ctypes.c_char * len(data)).from_address(self._end - len(data))).cast("B")


# --- mutants ------------------------------------------------------------------------------------------------------


class Mutants:
    """What damaged captures are made from: whole captures, and their frames by link type."""

    def __init__(self) -> None:
        whole = {name: make() for name, make in KINDS.items()}
        self.files = [data for data in whole.values() if data[:2] not in (b"\x1f\x8b", b"\x28\xb5")]
        # kind by kind, so that what there are few frames of comes as often
        self.frames = [_frames_of(data) for data in self.files if data[:4] == b"\xd4\xc3\xb2\xa1"]

    def every_frame(self) -> list[tuple[int, bytes]]:
        """Frames that differ, with their link types."""
        return list(dict.fromkeys(one for kind in self.frames for one in kind))

    def make(self, seed: int, number: int) -> tuple[bytes, int | None]:
        """A mutant, and how many packets it holds where that is sure."""
        chance = random.Random(f"{seed}:{number}")
        kind = number % 4
        if kind < 2:
            return self._of_frames(chance)
        if kind == 2:
            return _damaged(chance, chance.choice(self.files), chance.choice(self.files)), None
        head = chance.choice(self.files)[: chance.choice((4, 24, 28, 48, 60, 76))]
        return head + chance.randbytes(chance.randrange(400)), None

    def _of_frames(self, chance: random.Random) -> tuple[bytes, int]:
        """A sound file around frames that are cut and damaged; in pcapng, of several link types."""
        several = chance.random() < 0.4
        kind = chance.choice(self.frames)
        packets = []
        for _ in range(chance.randrange(1, 8)):
            link, data = chance.choice(chance.choice(self.frames) if several else kind)
            packets.append((link, _record(chance, data)))
        if not several:
            link = packets[0][0] if chance.random() < 0.9 else chance.choice(LINKS)
            records = [one for _, one in packets]
            return classic(records, link, chance.choice("<>"), chance.random() < 0.5), len(packets)
        blocks = Blocks(chance.choice("<>"))
        for number, (link, one) in enumerate(packets):
            blocks.interface(link, resolution=chance.choice((None, 0, 3, 6, 9, 0x80 | 10, 0x80 | 30)))
            chance.choice((blocks.packet, blocks.old_packet))(one, number)
            if chance.random() < 0.1:
                blocks.unknown()
        return blocks.bytes(), len(packets)


def _record(chance: random.Random, data: bytes) -> Packet:
    """A frame with a damaged byte or two, cut anywhere, of whatever length on the wire."""
    length = len(data) if chance.random() < 0.8 else chance.choice((0, 1, 64, 9000, 65549, 2**24 - 1))
    if chance.random() < 0.6:
        data = bytes(_pocked(chance, bytearray(data)))
    if chance.random() < 0.6:  # mostly within the headers, where every byte counts
        data = data[: min(int(chance.expovariate(1 / 50)), len(data)) if chance.random() < 0.7 else len(data) // 2]
    time_ns = START_NS + chance.choice((0, 1, 999_999, 10**6, 10**9, -(10**9))) * chance.randrange(9)
    return Packet(time_ns, data, length)


def _frames_of(data: bytes) -> list[tuple[int, bytes]]:
    link, found, at = struct.unpack_from("<I", data, 20)[0], [], 24
    while at + 16 <= len(data):
        kept = struct.unpack_from("<I", data, at + 8)[0]
        found.append((link, data[at + 16 : at + 16 + kept]))
        at += 16 + kept
    return found


def _pocked(chance: random.Random, data: bytearray) -> bytearray:
    """Some bytes or words are others; mostly at the beginning, where the headers are."""
    for _ in range(chance.randrange(1, 5) if data else 0):
        at = (
            min(int(chance.expovariate(1 / 40)), len(data) - 1)
            if chance.random() < 0.8
            else chance.randrange(len(data))
        )
        way = chance.randrange(4)
        if way == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            data[at] = chance.choice((0, 1, 5, 0x45, 0x4F, 0x60, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        else:
            size = 2 * (way - 1)
            word = chance.choice(_WORDS) & (2 ** (8 * size) - 1)
            data[at : at + size] = word.to_bytes(size, chance.choice(("little", "big")))[: len(data) - at]
    return data


def _damaged(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """A whole file, damaged anywhere."""
    made = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at, size = chance.randrange(len(made) + 1), chance.randrange(1, 200)
        way = chance.randrange(8)
        if way == 0:
            del made[at:]
        elif way == 1:
            del made[at : at + size]
        elif way == 2:
            made[at:at] = chance.randbytes(size)
        elif way == 3:
            from_ = chance.randrange(len(other))
            made[at:] = other[from_ : from_ + 2000]
        elif way == 4:
            made[:4] = chance.choice((b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\xc3\xd4", b"\x4d\x3c\xb2\xa1", b"\n\r\r\n"))
        elif way == 5:
            made[20:22] = struct.pack("<H", chance.choice(LINKS))
        else:
            made = made[:at] + _pocked(chance, made[at:])
    return bytes(made)


# --- what must hold -----------------------------------------------------------------------------------------------


def scan(data: bytes, guarded: Guarded, cuts: list[int]) -> Scanned | None:
    """The capture, fed in blocks that are cut there; None: it is not a capture."""
    try:
        made = Scan()
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            made.feed(guarded.hold(data[begin:end]))
        return made.finish()
    except UsageError as error:
        assert str(error)
        return None


def check(found: Scanned, packets: int | None) -> None:
    """Sums agree, nothing is lost without a count, and no number is impossible."""
    counts, rows, cells = found.counts, found.conversations, np.asarray(found.cells)
    assert rows.dtype == CONVERSATION
    assert cells.dtype == CELL
    assert min(counts.values()) >= 0, counts
    if packets is not None:
        assert counts["packets"] == packets, counts
    outer = rows[rows["layer"] == 0]
    within = int(outer["packets"].sum())
    reasons = sum(n for name, n in counts.items() if name not in ("packets", "bytes") and not name.endswith("_bytes"))
    assert within <= counts["packets"] <= within + reasons, (within, counts)
    assert int(outer["bytes"].sum()) <= counts["bytes"]
    for name in ("packets", "data_packets", "bytes", "data_bytes", "payload"):
        sums = np.zeros(2 * len(rows), np.int64)
        np.add.at(sums, cells["flow"], cells[name].astype(np.int64))
        assert np.array_equal(sums, rows[name].reshape(-1).astype(np.int64)), name
    assert (rows["data_packets"] <= rows["packets"]).all()
    assert (rows["data_bytes"] <= rows["bytes"]).all()
    # IP may say any length up to 65,535; a frame that offload left without one, its own
    assert (rows["payload"] <= np.maximum(rows["bytes"], rows["data_packets"] * 65535)).all()
    assert (rows["segments"] >= (rows["payload"] > 0)).all()
    assert (rows["segments"] <= rows["payload"]).all()
    assert (rows["retransmitted_bytes"] + rows["out_of_order_bytes"] <= rows["payload"] + rows["packets"]).all()
    assert (rows["repeated_bytes"] <= rows["payload"]).all()
    assert (rows["zero_windows"] <= rows["packets"]).all()
    assert (rows["resets"] <= rows["packets"]).all()
    assert ((rows["rtt_min_ns"] >= 0) == (rows["rtt_count"] > 0)).all()
    assert (rows["rtt_count"] * np.maximum(rows["rtt_min_ns"], 0) <= rows["rtt_sum_ns"]).all()
    assert (rows["handshake_ns"] >= -1).all()
    _check_times(found, rows, cells)
    pairs = found.queue_pairs
    for name in ("acknowledgements", "naks", "cnps", "psn_repeats"):
        assert (pairs[name] <= pairs["packets"]).all(), name


def _check_times(found: Scanned, rows: Any, cells: Any) -> None:
    if not len(rows):
        return
    if found.first_ns < 0:  # no packet has a time
        assert set(rows["first_ns"].tolist()) == set(rows["last_ns"].tolist()) == {-1}
        assert not cells["bin"].any()
        return
    assert found.first_ns <= rows["first_ns"].min()
    assert rows["last_ns"].max() <= found.last_ns
    assert (rows["first_ns"] <= rows["last_ns"]).all()
    assert found.start_ns <= found.first_ns
    starts = found.start_ns + cells["bin"].astype(np.int64) * found.bin_ns
    of = cells["flow"] // 2
    assert (starts + found.bin_ns > rows["first_ns"][of]).all()
    assert (starts <= rows["last_ns"][of]).all()


def same(a: Scanned | None, b: Scanned | None) -> bool:
    """Whether two scans found the same."""
    if a is None or b is None:
        return a is b
    tables = ("conversations", "cells", "queue_pairs")
    return a.counts == b.counts and all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in tables)


def judge(data: bytes, packets: int | None, number: int, guarded: Guarded) -> Scanned | None:
    """Scan a mutant and check what was found, for some of them with the stream split elsewhere, too."""
    chance = random.Random(number)
    # the header goes first: a first block is copied, and would not lie before the guard
    found = scan(data, guarded, [min(len(data), chance.choice((24, 28)))])
    if found is not None:
        check(found, packets)
    if number % 8 < 2:
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(1, 6)))
        assert same(found, scan(data, guarded, cuts)), f"split at {cuts}: another result"
    return found


def cut_everywhere(guarded: Guarded, link: int, data: bytes) -> None:
    """One frame, cut at every length, each time right before the guard."""
    made = Scan()
    made.feed(guarded.hold(classic([], link)))
    lengths = range(min(len(data), _MAX_CUT_BYTES) + 1)
    for length in lengths:
        made.feed(guarded.hold(classic([Packet(START_NS, data[:length], len(data))], link)[24:]))
    check(made.finish(), len(lengths))


def run(seed: int, first: int, count: int, started: Callable[[int], None]) -> dict[str, Any]:
    """Judge so many mutants: how many were captures, how many packets they had, and the rules that broke."""
    guarded, mutants = Guarded(1 << 20), Mutants()
    captures = packets = 0
    broken: list[str] = []
    scan(classic(frames(usual(), ethernet)), guarded, [])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _peak_bytes()
    started(-1)
    for link, data in mutants.every_frame() if first == 0 else ():
        cut_everywhere(guarded, link, data)
    for number in range(first, first + count):
        started(number)
        signal.alarm(MAX_S)  # a kernel that hangs is ended by it: no Python runs meanwhile
        data, sure = mutants.make(seed, number)
        try:
            found = judge(data, sure, number, guarded)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            broken.append(f"mutant {number}: {place.name}: {place.line}: {error!r}"[:300])
            continue
        if found is not None:
            captures += 1
            packets += found.counts["packets"]
    signal.alarm(0)
    grown_bytes = _peak_bytes() - before
    if grown_bytes > MAX_GROWTH_BYTES:
        broken.append(f"memory grew by {grown_bytes} bytes")
    return {"mutants": count, "captures": captures, "packets": packets, "grown_bytes": grown_bytes, "broken": broken}


def _peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """The command line above."""
    seed, first, count = map(int, sys.argv[1:4])
    with Path(sys.argv[4]).open("r+b") as file, mmap.mmap(file.fileno(), 8) as progress:
        print(json.dumps(run(seed, first, count, lambda number: struct.pack_into("<q", progress, 0, number))))


if __name__ == "__main__":
    main()
