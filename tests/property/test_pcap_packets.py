"""Any packets that are written as pcapng are read back unchanged by ringtap, dpkt and Scapy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import dpkt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.utils import RawPcapNgReader

from ringtap.analysis.pcap.single_packets import CapturePoint, read_packets
from tests.unit.capture_makers import Blocks, Packet

pytestmark = [pytest.mark.computes, pytest.mark.long]

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=40)
BODY = st.binary(max_size=90)
PACKET = st.tuples(st.integers(0, 2**62 - 1), BODY, st.integers(0, 70_000), st.integers(0, 2))
LINKS = (1, 101, 113)


@settings(max_examples=100, deadline=None)
@given(st.lists(PACKET, min_size=1, max_size=30), st.data())
def test_packets_are_read_back_unchanged(drawn: list[tuple[int, bytes, int, int]], data: st.DataObject) -> None:
    blocks = Blocks()
    for number, link in enumerate(LINKS):
        blocks.interface(link, snap=100, resolution=9, name=f"eth{number}")
    for t_ns, body, cut, interface in drawn:
        blocks.packet(Packet(t_ns, body, len(body) + cut), interface)
    expected = sorted(
        ((t_ns, len(body) + cut, body, LINKS[way]) for t_ns, body, cut, way in drawn), key=lambda one: one[0]
    )
    with tempfile.TemporaryDirectory() as folder:
        path, copy = Path(folder) / "made.pcapng", Path(folder) / "copy.pcapng"
        path.write_bytes(blocks.bytes())
        packets = read_packets([CapturePoint(path)])
        packets.about = data.draw(TEXT)
        packets.comments |= data.draw(st.dictionaries(st.integers(0, len(packets) - 1), TEXT))
        packets.to_pcapng(copy)
        again = read_packets([CapturePoint(copy)])
        assert [(one.t_ns, one.wire_bytes, one.data, one.linktype) for one in again] == expected
        assert [one.interface for one in again] == [f"eth{LINKS.index(link)}" for *_, link in expected]
        with copy.open("rb") as file:
            assert [bytes(body) for _, body in dpkt.pcapng.Reader(file)] == [body for _, _, body, _ in expected]
        with RawPcapNgReader(str(copy)) as reader:
            read = [(about.tshigh << 32 | about.tslow, about.wirelen, body, about.linktype) for body, about in reader]
        assert read == expected
