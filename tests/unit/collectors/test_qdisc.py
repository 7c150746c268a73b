"""Queueing disciplines on a datagram recorded from a real kernel (6.18), beside what tc said at that moment."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.collectors.collector_interface import Context
from ringtap.collectors.netlink import HEADER_BYTES, aligned, attributes, message_at
from ringtap.collectors.qdisc import QdiscCollector, QdiscTable
from ringtap.core.append_only_logs import open_records

pytestmark = pytest.mark.shares

GOLD = Path(__file__).resolve().parents[2] / "gold"
DUMP = (GOLD / "qdisc-6.18.bin").read_bytes()
TC: list[dict[str, Any]] = json.loads((GOLD / "qdisc-6.18.json").read_text())
ROOT = 0xFFFFFFFF
RECORD = struct.Struct("<qqIIIQIIIIII")
NAMES = ("t_ns", "mono_ns", "interface", "handle", "parent", "bytes", "packets")
NAMES += ("backlog_packets", "backlog_bytes", "drops", "requeues", "overlimits")


def rows_of(records: bytes) -> list[dict[str, int]]:
    return [dict(zip(NAMES, row, strict=True)) for row in RECORD.iter_unpack(records)]


def dump(table: QdiscTable, data: bytes, mono_ns: int) -> list[dict[str, int]]:
    table.begin(1000 + mono_ns, mono_ns)
    assert not table.take(memoryview(data), len(data))
    return rows_of(table.records())


def statistics_places(data: bytes) -> list[dict[int, int]]:
    """Of each discipline, where the parts of its TCA_STATS2 start."""
    view, position, places = memoryview(data), 0, []
    while size := message_at(view, position, len(data))[0]:
        for kind, start, length in attributes(view, position + HEADER_BYTES + 20, position + size):
            if kind == 7:
                places.append({inner: place for inner, place, _ in attributes(view, start, start + length)})
        position += aligned(size)
    return places


def test_every_discipline_reads_as_tc_shows_it() -> None:
    table = QdiscTable()
    rows = dump(table, DUMP, 7)
    assert len(rows) == len(TC) == 3
    assert list(table.kinds.values()) == [one["kind"] for one in TC] == ["noqueue", "pfifo", "tbf"]
    for row, one in zip(rows, TC, strict=True):
        assert (row["t_ns"], row["mono_ns"], row["parent"]) == (1007, 7, ROOT)
        assert f"{row['handle'] >> 16:x}:" == one["handle"]
        assert table.kinds[f"{row['interface']}:{row['handle']}"] == one["kind"]
        expected = {name: one[name] for name in ("bytes", "packets", "drops", "overlimits", "requeues")}
        expected |= {"backlog_bytes": one["backlog"], "backlog_packets": one["qlen"]}
        assert {name: row[name] for name in expected} == expected
    assert max(row["bytes"] for row in rows) > 0


def test_only_what_changed_is_told_again() -> None:
    table = QdiscTable()
    dump(table, DUMP, 1)
    assert dump(table, DUMP, 2) == []
    changed = bytearray(DUMP)
    queue = statistics_places(DUMP)[2][3]
    struct.pack_into("=5I", changed, queue, 11, 12_000, 13, 14, 15)
    rows = dump(table, bytes(changed), 3)
    assert len(rows) == 1
    parts = {"backlog_packets": 11, "backlog_bytes": 12_000, "drops": 13, "requeues": 14, "overlimits": 15}
    assert {name: rows[0][name] for name in parts} == parts


def test_disciplines_that_are_gone_are_forgotten() -> None:
    """Interfaces of containers come and go for days."""
    table, done = QdiscTable(), DUMP[-20:]
    assert len(dump(table, DUMP, 1)) == 3
    table.end()
    assert len(table._known) == len(table._layouts) == 3
    assert dump(table, done, 2) == []
    table.end()
    assert not table._known
    assert not table._layouts
    assert len(dump(table, DUMP, 3)) == 3


def test_children_that_share_their_roots_handle_leave_it_its_kind() -> None:
    """As below mq: root 0: and, a queue each, children 0:."""
    table = QdiscTable()
    position, size = 0, message_at(memoryview(DUMP), 0, len(DUMP))[0]
    message = bytearray(DUMP[position : position + size])
    child = bytearray(DUMP[aligned(size) :])
    tail = bytes(child[-20:])
    child = child[: message_at(memoryview(bytes(child)), 0, len(child))[0]]
    struct.pack_into("=II", child, 20, struct.unpack_from("=I", message, 20)[0], 0)
    struct.pack_into("=I", child, 28, 1)
    rows = dump(table, bytes(message) + bytes(child) + tail, 1)
    assert [row["parent"] for row in rows] == [ROOT, 1]
    assert list(table.kinds.values()) == ["noqueue"]


@given(data=st.data())
def test_damaged_datagrams_raise_nothing_but_oserror(data: st.DataObject) -> None:
    damaged = bytearray(DUMP)
    for _ in range(data.draw(st.integers(0, 6))):
        damaged[data.draw(st.integers(0, len(DUMP) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(DUMP)))
    table = QdiscTable()
    table.begin(1, 1)
    for _ in range(2):
        with contextlib.suppress(OSError):
            table.take(memoryview(damaged), length)
        assert len(table.records()) % RECORD.size == 0


def test_the_collector_says_what_there_is(tmp_path: Path) -> None:
    collector = QdiscCollector(Context(tmp_path, 0.001))
    assert collector.every_s == 0.01
    assert collector.check().state in ("ok", "degraded")
    collector.start()
    collector.sample()
    facts = collector.stop()
    assert facts["lost_answers"] == 0
    records = open_records(tmp_path / "qdisc" / "qdisc.rec")
    assert [field.name for field in records.fields] == list(NAMES)
    assert records.about["kinds"] == facts["kinds"]
    assert {str(row[2]) for row in records.tail()} <= set(records.about["interfaces"])
