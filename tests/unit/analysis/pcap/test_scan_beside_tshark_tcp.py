"""What TCP says beside its bytes, against tshark's analysis: repeats, order, round trips, windows, resets."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.unit.analysis.pcap.test_scan_beside_tshark import Flows, flows, tshark  # noqa: F401 -- flows is a fixture
from tests.unit.capture_makers import A4, A6, B4, B6, MS, US, Talk, Timed, classic, frames

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

SIZE = 1000
FLAGS = ("retransmission", "fast_retransmission", "spurious_retransmission", "out_of_order", "zero_window")
_COLUMNS = (
    *("ip.src", "ipv6.src", "tcp.srcport", "tcp.dstport", "tcp.len", "tcp.flags.reset"),
    *(f"tcp.analysis.{flag}" for flag in FLAGS),
    *("tcp.analysis.initial_rtt", "tcp.analysis.ack_rtt", "frame.number"),
)


Sender = tuple[str, int, int]
"""Its address, its port and the other's."""


def analysis(path: Path) -> dict[Sender, dict[str, Any]]:
    """tshark's TCP analysis, summed by sender."""
    found: dict[Sender, dict[str, Any]] = defaultdict(
        lambda: {"again": 0, "late": 0, "zero": 0, "resets": 0, "payload": 0, "handshake": set(), "rtts": []}
    )
    fields = [word for name in _COLUMNS for word in ("-e", name)]
    for line in tshark(path, "-T", "fields", *fields).splitlines():
        ip, ipv6, port, to, size, reset, again, fast, spurious, late, zero, handshake, rtt, _ = line.split("\t")
        one = found[ip or ipv6, int(port), int(to)]
        one["payload"] += int(size)
        # a frame has one of these, but a fast or spurious retransmission is marked as a retransmission, too
        one["late" if late else "again"] += int(size) if late or again or fast or spurious else 0
        one["zero"] += bool(zero)
        one["resets"] += reset in ("1", "True")
        one["handshake"] |= {round(float(handshake) * 1e9)} if handshake else set()
        one["rtts"] += [round(float(rtt) * 1e9)] if rtt else []
    return dict(found)


def by_sender(conversations: list[dict[str, Any]]) -> dict[Sender, dict[str, Any]]:
    found = {}
    for one in conversations:
        for way, end, other in (("ab", "a", "b"), ("ba", "b", "a")):
            figures = {key[:-3]: one[key] for key in one if key.endswith(f"_{way}")}
            figures["handshake_ns"] = one["handshake_ns"]
            found[one[end], one[f"{end}_port"], one[f"{other}_port"]] = figures
    return found


def lossy(seed: int, ports: tuple[int, int], repeated: float, lost: float, swapped: float) -> list[Timed]:
    """A sender as captured in the middle of its path, 400 µs of round trip.

    Some segments are sent again though they were captured (lost behind the capture), some were lost before it and
    come 2 ms later, some overtake their neighbour by 20 µs. The receiver acknowledges what it has, twice if it lacks
    something, and never before it can know.
    """
    chance = random.Random(seed)
    ends = (A4, B4) if seed % 2 else (A6, B6)
    talk = Talk(*ends, ports).open()
    first = talk.next[0]
    put: list[tuple[int, str, int]] = []  # time, what, byte
    now_ns = talk.now_ns + MS
    for number in range(200):
        now_ns += chance.randrange(30 * US, 60 * US)
        fate, at = chance.random(), first + number * SIZE
        if fate < repeated:
            put += [(now_ns, "data", at), (now_ns + 2 * MS, "data", at)]
        elif fate < repeated + lost:
            put += [(now_ns + 2 * MS, "data", at)]
        elif fate < repeated + lost + swapped:
            put += [(now_ns + 80 * US, "data", at)]
        else:
            put += [(now_ns, "data", at)]
    got: set[int] = set()
    upto = first
    for time_ns, _, at in sorted(put):
        talk.now_ns = time_ns
        talk.put(0, at, SIZE)
        got.add(at)
        while upto in got:
            upto += SIZE
        talk.next[0] = upto
        talk.now_ns = time_ns + 200 * US
        talk.put(1, talk.next[1])
    return talk.packets


CASES = {"repeated": (0.03, 0, 0), "lost": (0, 0.02, 0), "swapped": (0, 0, 0.03), "all": (0.02, 0.02, 0.02)}


def test_repeats_and_order(flows: Flows, tmp_path: Path) -> None:  # noqa: F811
    """Bytes sent again and bytes out of order.

    Their sum is exact. How it is divided is a rule of thumb in both, over the time that a hole was open: tshark asks
    how long it is since the last segment and looks at duplicate acknowledgements, ringtap at the hole itself. The
    parts may differ by 5 % of the sum or three segments.
    """
    packets: list[Timed] = []
    for place, shares in enumerate(CASES.values()):
        for seed in range(2):
            packets += lossy(seed, (40_000 + 10 * place + seed, 5001), *shares)
    path = tmp_path / "lossy.pcap"
    path.write_bytes(classic(frames(sorted(packets))))
    expected, found = analysis(path), by_sender(flows(path)["conversations"])
    assert found.keys() == expected.keys()
    for sender, theirs in expected.items():
        ours = found[sender]
        assert ours["payload"] == theirs["payload"]
        total = theirs["again"] + theirs["late"]
        parts = ours["retransmitted_bytes"], ours["out_of_order_bytes"]
        assert sum(parts) == total, (sender, parts, theirs)
        assert parts[0] == pytest.approx(theirs["again"], abs=max(0.05 * total, 3 * SIZE)), (sender, parts, theirs)
    assert sum(one["again"] for one in expected.values()) > 20 * SIZE
    assert sum(one["late"] for one in expected.values()) > 10 * SIZE


def test_round_trips_windows_and_resets(flows: Flows, tmp_path: Path) -> None:  # noqa: F811
    packets: list[Timed] = []
    for place, rtt_ns in enumerate((80 * US, 400 * US, 30 * MS)):
        for ends in ((A4, B4), (A6, B6)):
            talk = Talk(*ends, (41_000 + place, 5001)).open(rtt_ns).data(0, *[SIZE] * 5).data(1, 10)
            talk.send(1, window=0).wait(MS).send(1, window=0).wait(MS).send(1, window=100)
            talk.data(0, SIZE)
            if place:
                talk.send(place - 1, 0, "RA" if place == 1 else "R")
            else:
                talk.close()
            packets += talk.packets
    path = tmp_path / "talks.pcap"
    path.write_bytes(classic(frames(sorted(packets)), nano=True))
    expected, found = analysis(path), by_sender(flows(path)["conversations"])
    assert found.keys() == expected.keys()
    for sender, theirs in expected.items():
        ours = found[sender]
        assert (ours["zero_windows"], ours["resets"]) == (theirs["zero"], theirs["resets"]), sender
        assert theirs["handshake"] <= {ours["handshake_ns"]}, sender
    assert sum(one["zero"] for one in expected.values()) == 12
    assert sum(one["resets"] for one in expected.values()) == 4
    # tshark gives the round trip to the acknowledgement's sender, ringtap to the data's; it times FIN and SYN, too
    for (host, port, to), ours in found.items():
        if to == 5001:
            answers = expected[B4 if host == A4 else B6, to, port]["rtts"]
            assert ours["rtt_min_ns"] == 100 * US, (host, port)
            assert ours["rtt_min_ns"] in answers, (host, port)


def test_wire_segments_of_offloaded_packets(flows: Flows, tmp_path: Path) -> None:  # noqa: F811
    """As many as the MSS of the handshake makes, less the options that every segment carries."""
    talk = Talk(A4, B4, (42_000, 5001)).open(mss=1460).data(0, 1448, 1449, 14_480, 14_481, 1)
    plain = Talk(A4, B4, (42_001, 5001)).open(mss=8960, timestamps=False).data(0, 8960, 8961, 60_000)
    path = tmp_path / "offload.pcap"
    path.write_bytes(classic([one.cut(96) for one in frames(talk.packets + plain.packets)]))
    found = by_sender(flows(path)["conversations"])
    assert found[A4, 42_000, 5001]["segments"] == 1 + 2 + 10 + 11 + 1
    assert found[A4, 42_001, 5001]["segments"] == 1 + 2 + 7
