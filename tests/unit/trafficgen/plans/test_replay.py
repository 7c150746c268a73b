"""Replay: what an earlier run's log or a capture holds becomes the flows of a plan."""

from __future__ import annotations

import random
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.pcap.read_payload_packets import read_segments
from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.flow_plan_file import PlanFile, write_plan
from ringtap.core.flow_plan_format import Flow
from ringtap.core.sent_flow_log import FIELDS as SENT_FIELDS
from ringtap.trafficgen.plans.registry import make_plan

pytestmark = pytest.mark.shares

MS = 1_000_000
ORIGIN_NS = 1_700_000_000 * 10**9
ABOUT = {"source": "sender", "origin_ns": ORIGIN_NS, "destinations": ["a:1", "b:2"], "sources": ["10.0.0.9"]}
NONE = 2**32 - 1


def sent_log(folder: Path, rows: list[dict[str, int]], fields: tuple[Field, ...] = SENT_FIELDS, **about: Any) -> Path:
    path = folder / "sent.rec"
    writer = RecordWriter(path, fields, ABOUT | about)
    names = [field.name for field in fields]
    writer.append_many([[row.get(name, 0) for name in names] for row in rows])
    writer.close()
    return path


def row(start_ms: int, size_bytes: int, destination: int = 0, source: int = NONE, **more: int) -> dict[str, int]:
    start_ns = ORIGIN_NS + start_ms * MS
    return {"start_ns": start_ns, "size_bytes": size_bytes, "destination": destination, "source": source} | more


def test_a_log_becomes_the_flows_that_were_sent(tmp_path: Path) -> None:
    rows = [row(30, 7, 1, 0), row(5, 100), {"flow": 2, "size_bytes": 9}, row(9, 0, sent_bytes=55)]
    rows[0]["finish_ns"] = ORIGIN_NS + 41 * MS + 1
    plan = make_plan("replay", {"replay": sent_log(tmp_path, rows)})
    expected = [Flow(5 * MS, "", "a:1", 100), Flow(9 * MS, "", "a:1", 55), Flow(30 * MS, "10.0.0.9", "b:2", 7)]
    assert list(plan.flows()) == expected
    assert (plan.header["flows"], plan.header["bytes"], plan.header["duration_ns"]) == (3, 162, 42 * MS)
    write_plan(plan, tmp_path / "plan")
    assert list(PlanFile(tmp_path / "plan").flows()) == expected


def test_a_log_replays_elsewhere_scaled_and_shortened(tmp_path: Path) -> None:
    path = sent_log(tmp_path, [row(5, 1000), row(6, 2000, 1, 0), row(30, 7)])
    given = {"replay": path, "to": ["c:3"], "from": ["s", "t"], "scale": 100.0, "duration": 20 * MS}
    assert list(make_plan("replay", given).flows()) == [Flow(5 * MS, "s", "c:3", 10), Flow(6 * MS, "t", "c:3", 20)]
    tiny = make_plan("replay", {"replay": path, "scale": 1e6})
    assert {flow.size_bytes for flow in tiny.flows()} == {1}


def test_a_log_without_a_source_column_replays(tmp_path: Path) -> None:
    fields = tuple(field for field in SENT_FIELDS if field.name != "source")
    plan = make_plan("replay", {"replay": sent_log(tmp_path, [row(1, 5)], fields)})
    assert list(plan.flows()) == [Flow(MS, "", "a:1", 5)]


@pytest.mark.parametrize(
    ("rows", "about", "words"),
    [
        ([], {}, "no flow to replay"),
        ([row(1, 5)], {"source": "receiver"}, "not a log of"),
        ([row(1, 5)], {"origin_ns": None}, "not a log of"),
        ([row(1, 5)], {"destinations": 3}, "about.destinations is not a list"),
        ([row(1, 5, 2)], {}, "damaged"),
        ([row(-1, 5)], {}, "damaged"),
        ([row(1, -5)], {}, "damaged"),
        ([row(1, 5)], {"destinations": ["nowhere"]}, "HOST:PORT"),
    ],
)
def test_a_log_that_cannot_be_replayed_is_one_sentence(
    rows: list[dict[str, int]], about: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        make_plan("replay", {"replay": sent_log(tmp_path, rows, **about)})


def test_what_is_no_log_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.rec").write_text("nothing")
    with pytest.raises(UsageError, match="not a ringtap record file"):
        make_plan("replay", {"replay": tmp_path / "x.rec"})
    with pytest.raises(UsageError, match="cannot be read"):
        make_plan("replay", {"replay": tmp_path / "missing.rec"})
    with pytest.raises(UsageError, match="--gap"):
        make_plan("replay", {"replay": sent_log(tmp_path, [row(1, 5)]), "gap": 1})
    with pytest.raises(UsageError, match="scale"):
        make_plan("replay", {"replay": sent_log(tmp_path / "again", [row(1, 5)]), "scale": 0.0})


def capture(folder: Path, packets: list[tuple[float, str, int, str, int, int]], cut: int = 0) -> Path:
    """A pcap file with nanoseconds of (time in ms, source, port, destination, port, payload bytes)."""
    data = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 1)
    for at_ms, source, source_port, destination, port, size in packets:
        tcp = struct.pack("!HHIIBBHHH", source_port, port, 0, 0, 5 << 4, 0x10, 0, 0, 0) + bytes(size)
        ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, 6, 0)
        ip += socket.inet_aton(source) + socket.inet_aton(destination)
        frame = bytes(12) + b"\x08\x00" + ip + tcp
        seconds, rest_ns = divmod(ORIGIN_NS + round(at_ms * MS), 10**9)
        data += struct.pack("<IIII", seconds, rest_ns, len(frame), len(frame)) + frame
    path = folder / "x.pcap"
    path.write_bytes(data[: len(data) - cut])
    return path


PACKETS = [
    (0, "10.0.0.1", 40000, "10.0.0.2", 80, 0),
    (1, "10.0.0.1", 40000, "10.0.0.2", 80, 100),
    (1.5, "10.0.0.2", 80, "10.0.0.1", 40000, 7),
    (2, "10.0.0.3", 50000, "10.0.0.2", 80, 30),
    (3, "10.0.0.1", 40000, "10.0.0.2", 80, 50),
    (90, "10.0.0.1", 40000, "10.0.0.2", 80, 11),
    (300, "10.0.0.1", 40000, "10.0.0.2", 80, 1000),
]


def test_a_capture_becomes_one_flow_each_way_cut_at_pauses(tmp_path: Path) -> None:
    plan = make_plan("replay", {"replay": capture(tmp_path, PACKETS), "to": ["c:3", "d:4"]}, read_segments)
    assert list(plan.flows()) == [
        Flow(0, "", "c:3", 161),
        Flow(500_000, "", "d:4", 7),
        Flow(MS, "", "c:3", 30),
        Flow(299 * MS, "", "c:3", 1000),
    ]
    assert plan.header["duration_ns"] == 300 * MS
    assert plan.header["sources"] == []


def test_the_pause_and_the_sources_are_the_users(tmp_path: Path) -> None:
    given = {"replay": capture(tmp_path, PACKETS), "to": ["c:3"], "gap": 10 * MS, "from": ["s", "t", "u"]}
    assert list(make_plan("replay", given, read_segments).flows()) == [
        Flow(0, "s", "c:3", 150),
        Flow(500_000, "t", "c:3", 7),
        Flow(MS, "u", "c:3", 30),
        Flow(89 * MS, "s", "c:3", 11),
        Flow(299 * MS, "s", "c:3", 1000),
    ]


def test_captures_that_cannot_be_replayed_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--to"):
        make_plan("replay", {"replay": capture(tmp_path, PACKETS)})
    with pytest.raises(MeasurementError):
        make_plan("replay", {"replay": capture(tmp_path, PACKETS, cut=5), "to": ["c:3"]}, read_segments)
    with pytest.raises(UsageError, match="no flow to replay"):
        make_plan("replay", {"replay": capture(tmp_path, PACKETS[:1]), "to": ["c:3"]}, read_segments)
    (tmp_path / "x.pcap").write_text("nothing")
    with pytest.raises(UsageError):
        make_plan("replay", {"replay": tmp_path / "x.pcap", "to": ["c:3"]}, read_segments)


def test_every_byte_of_a_random_capture_is_replayed_once(tmp_path: Path) -> None:
    rng = random.Random(4)
    packets = [
        (number * 0.3, f"10.0.0.{rng.randrange(1, 5)}", rng.randrange(1, 4), "10.0.1.1", 80, rng.randrange(0, 1449))
        for number in range(400)
    ]
    plan = make_plan("replay", {"replay": capture(tmp_path, packets), "to": ["c:3"], "gap": 3 * MS}, read_segments)
    flows = list(plan.flows())
    assert sum(flow.size_bytes for flow in flows) == sum(packet[5] for packet in packets)
    assert [flow.start_ns for flow in flows] == sorted(flow.start_ns for flow in flows)
    assert len(flows) > 12
