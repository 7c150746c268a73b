"""Captures that are damaged anywhere cost a sentence, never a traceback, and never a number below 0."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.capture import Capture
from ringtap.errors import UsageError

GOLD = (Path(__file__).resolve().parents[1] / "gold" / "loopback.pcap").read_bytes()


def read(data: bytes) -> tuple[Capture, list[int]] | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.pcap"
        path.write_bytes(data)
        try:
            capture = Capture(path)
            return capture, [one.payload_bytes for one in capture.segments()]
        except UsageError:
            return None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    damaged = bytearray(GOLD)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(4, len(GOLD) - 1))] = data.draw(st.integers(0, 255))
    found = read(bytes(damaged))
    if found is not None:
        capture, payloads = found
        assert min(payloads, default=0) >= 0
        assert capture.packets == len(payloads) + capture.others + capture.unreadable


@settings(max_examples=200, deadline=None)
@given(st.integers(24, len(GOLD)))
def test_cut_anywhere(length: int) -> None:
    """Every byte is in a packet that was read, or in the torn end."""
    whole, cut = read(GOLD), read(GOLD[:length])
    assert whole is not None and cut is not None
    capture, payloads = cut
    assert whole[1][: len(payloads)] == payloads
    assert 24 + sum(16 + size for size in kept()[: capture.packets]) + capture.torn_bytes == length


def kept() -> list[int]:
    sizes, at = [], 24
    while at < len(GOLD):
        sizes.append(int.from_bytes(GOLD[at + 8 : at + 12], "little"))
        at += 16 + sizes[-1]
    return sizes


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([0, 1, 12, 101, 108, 113, 228, 276]), st.lists(st.binary(max_size=120), max_size=10))
def test_any_frames(linktype: int, frames: list[bytes]) -> None:
    data = GOLD[:20] + linktype.to_bytes(4, "little")
    for frame in frames:
        data += bytes(8) + len(frame).to_bytes(4, "little") * 2 + frame
    found = read(data)
    assert found is not None
    assert found[0].packets == len(frames)
    assert min(found[1], default=0) >= 0
