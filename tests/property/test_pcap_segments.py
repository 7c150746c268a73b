"""Captures that are damaged anywhere give segments or one sentence, and those before a cut are not changed by it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.pcap.read_payload_packets import read_segments
from ringtap.core.errors import MeasurementError, UsageError

pytestmark = [pytest.mark.computes, pytest.mark.long]

GOLD = (Path(__file__).resolve().parents[1] / "gold" / "loopback.pcap").read_bytes()


def read(data: bytes) -> list[int] | str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.pcap"
        path.write_bytes(data)
        try:
            return [payload_bytes for _, _, payload_bytes in read_segments(path)]
        except (MeasurementError, UsageError) as error:
            return str(error)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes(data: st.DataObject) -> None:
    damaged = bytearray(GOLD)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(4, len(GOLD) - 1))] = data.draw(st.integers(0, 255))
    found = read(bytes(damaged))
    assert found if isinstance(found, str) else min(found, default=1) > 0


@settings(max_examples=100, deadline=None)
@given(st.integers(24, len(GOLD)))
def test_cut_anywhere(length: int) -> None:
    ends, at = [24], 24
    while at < len(GOLD):
        at += 16 + int.from_bytes(GOLD[at + 8 : at + 12], "little")
        ends.append(at)
    whole, found = read(GOLD), read(GOLD[:length])
    if length in ends:
        assert isinstance(found, list) and found == whole[: len(found)]
    else:
        packets = sum(end <= length for end in ends) - 1
        assert isinstance(found, str) and f"ends within packet {packets + 1}: " in found
