"""Packets that a capture holds several times count once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scapy.layers.inet import IP
from scapy.layers.inet6 import IPv6

from ringtap import cli
from ringtap.analysis.pcap import read_captures
from ringtap.analysis.pcap.duplicates import copies_note, has_copies
from ringtap.analysis.pcap.read_payload_packets import read_segments
from ringtap.analysis.pcap.scan_dtypes import CONVERSATION
from tests.unit.capture_makers import A4, A6, B4, B6, MS, SLL2, Packet, Talk, classic, cooked2, frames

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

COLUMNS = ["packets_ab", "packets_ba", "bytes_ab", "bytes_ba", "payload_ab", "payload_ba", "retransmitted_bytes_ab"]


def ids(start: int = 1) -> object:
    """Return a maker of IPv4 headers with an identification of their own each."""
    numbers = iter(range(start, 65_536))
    return lambda a, b: IP(src=a, dst=b, id=next(numbers), flags="DF")


def packets(family: int, again: bool = False) -> list[Packet]:
    """A connection that sends 300 segments, of which some are lost and sent again."""
    ends, ip = ((A4, B4), ids()) if family == 4 else ((A6, B6), lambda a, b: IPv6(src=a, dst=b))
    talk = Talk(*ends, (40001, 5001), ip).open()
    for number in range(150):
        talk.data(0, 1000, 1000).data(1, 400)
        if again and number % 50 == 0:
            talk.put(0, talk.next[0] - 1000, 1000, "PA", options=talk._options).wait(5 * MS)
    return frames(talk.packets, cooked2)


def twice(every: list[Packet], after_ns: int) -> list[Packet]:
    copies = [Packet(one.time_ns + after_ns, one.data, one.length) for one in every]
    return sorted([*every, *copies], key=lambda one: one.time_ns)


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("after_ns", [0, 2_000, 300_000])
def test_copies_count_once(tmp_path: Path, family: int, after_ns: int) -> None:
    every = packets(family)
    once, both = tmp_path / "once.pcap", tmp_path / "both.pcap"
    once.write_bytes(classic(every, SLL2, nano=True))
    both.write_bytes(classic(twice(every, after_ns), SLL2, nano=True))
    expected, found = read_captures(once), read_captures(both)
    assert found.conversations()[COLUMNS].equals(expected.conversations()[COLUMNS])
    assert found.binned(what="payload").sum() == expected.binned(what="payload").sum()
    assert (found.counts["packets"], found.counts["copies"]) == (2 * len(every), len(every))


def test_what_is_sent_again_is_no_copy(tmp_path: Path) -> None:
    every = packets(4, again=True)
    once, both = tmp_path / "once.pcap", tmp_path / "both.pcap"
    once.write_bytes(classic(every, SLL2, nano=True))
    both.write_bytes(classic(twice(every, 2_000), SLL2, nano=True))
    expected, found = read_captures(once), read_captures(both)
    assert expected.counts["copies"] == 0
    assert expected.conversations()["retransmitted_bytes_ab"].tolist() == [3000]
    assert found.conversations()[COLUMNS].equals(expected.conversations()[COLUMNS])


def test_copies_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = tmp_path / "both.pcap"
    both.write_bytes(classic(twice(packets(4), 2_000), SLL2, nano=True))
    assert cli.main(["flows", str(both), "--no-cache"]) == 0
    text = capsys.readouterr().out
    assert "packets are copies of one before" in text
    assert "each copy counts" not in text
    # a pipe cannot be read a second time
    done = subprocess.run(
        [sys.executable, "-m", "ringtap", "flows", "-"], input=both.read_bytes(), capture_output=True, check=True
    )
    assert b"each copy counts: read a file rather than a pipe" in done.stdout


def test_copies_are_no_flows_to_replay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    every = packets(4)
    once, both = tmp_path / "once.pcap", tmp_path / "both.pcap"
    once.write_bytes(classic(every, SLL2, nano=True))
    both.write_bytes(classic(twice(every, 2_000), SLL2, nano=True))
    with caplog.at_level("INFO", "ringtap"):
        assert list(read_segments(both)) == list(read_segments(once))
    assert [one for one in caplog.messages if "copies" in one] == [*copies_note(str(both), {"copies": len(every)})]


def flows(*amounts: tuple[int, int]) -> np.ndarray:
    """Return conversations of one direction each, with their payload and what was seen before."""
    rows = np.zeros(len(amounts), CONVERSATION)
    for row, (payload, again) in zip(rows, amounts, strict=True):
        row["payload"][0], row["retransmitted_bytes"][0] = payload, again
    return rows


def test_copies_are_told_from_retransmissions() -> None:
    assert has_copies(flows((2_000_000, 1_000_000)))
    assert has_copies(flows((1_000_000, 0), (3_000_000, 2_000_000)))
    assert not has_copies(flows((2_000_000, 300_000), (1_000_000, 0)))
    assert not has_copies(flows((2_000, 1_000)))
    assert not has_copies(flows())
