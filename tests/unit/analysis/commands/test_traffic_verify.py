"""``ringtap traffic verify``: every number against one that was worked out by hand, and what it refuses."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ringtap.analysis.traffic.plan_bursts import burst_windows
from ringtap.cli import main
from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.flow_plan_table import read_plan
from ringtap.core.run_directory_schema import FLOW_STATES
from ringtap.core.sent_flow_log import FIELDS as SENT_FIELDS
from ringtap.core.sent_flow_log import NO_SOURCE
from ringtap.trafficgen.commands.zipapp import write_archive
from tests.gold.job_run import captured_twice

pytestmark = [pytest.mark.computes, pytest.mark.long]

MS, ORIGIN_NS = 1_000_000, 1_700_000_000_000_000_000
LAUNCH = {"origin_ns": ORIGIN_NS, "origin_monotonic_ns": 10**12}
TO = "127.0.0.1:5001"
# start in ms, bytes: a burst of 1 ms opens each period of 10 ms
FLOWS = [(0.2, 1000), (0.7, 2000), (3, 3000), (10.1, 1500), (10.5, 1500), (15, 300_000), (18, 20_000_000)]


def write_plan(path: Path, flows: list[tuple[float, int]] = FLOWS, **header: Any) -> Path:
    first = {"format": "ringtap-flow-plan", "version": 2, "kind": "burst", "duration_ns": 20 * MS, "flows": len(flows)}
    first |= {"bytes": sum(size for _, size in flows), "sources": [], "destinations": [TO]}
    first |= {"burst_length_ns": MS, "burst_period_ns": 10 * MS} | header
    lines = [f"{round(start * MS)}\t-\t{TO}\t{size}\t-\n" for start, size in flows]
    path.write_text(json.dumps(first) + "\n" + "".join(lines))
    return path


def record(number: int, start_ms: float, size: int, **other: int) -> tuple[int, ...]:
    """A flow that started 10 µs late and took 1 ms."""
    due = ORIGIN_NS + round(start_ms * MS)
    item = {"flow": number, "intended_start_ns": due, "start_ns": due + 10_000, "first_byte_ns": due + 20_000}
    item |= {"finish_ns": due + 10_000 + MS, "received_ns": due + MS, "lateness_ns": 10_000, "size_bytes": size}
    item |= {"sent_bytes": size, "acked_bytes": size, "retransmits": 0, "rtt_us": 70, "min_rtt_us": 50, "state": 0}
    item |= {"source": NO_SOURCE, "destination": 0} | other
    return tuple(item[field.name] for field in SENT_FIELDS)


def write_log(path: Path, plan: Path, records: list[tuple[int, ...]] | None = None, **about: Any) -> Path:
    header = json.loads(plan.read_text().splitlines()[0])
    about = {"source": "sender", "plan": header, "sources": [], "destinations": header["destinations"]} | about
    writer = RecordWriter(path, SENT_FIELDS, LAUNCH | about | {"transport": {}, "states": FLOW_STATES})
    rows = [record(number, *flow) for number, flow in enumerate(FLOWS)] if records is None else records
    writer.append_many(reversed(rows))  # several workers' records lie in no order
    writer.close()
    return path


def write_capture(path: Path, packets: list[tuple[float, int]], to: str = TO, source: str = "127.0.0.1") -> Path:
    """Packets of so many bytes at so many ms after the launch, headers alone kept, as raw IP."""
    data = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 96, 101)
    host, port = to.split(":")
    whole = 10_000_000  # no frame is larger than 16 MiB
    pieces = [(at, min(whole, size - done)) for at, size in packets for done in range(0, max(size, 1), whole)]
    sent = 0
    for number, (when_ms, payload) in enumerate(pieces):
        seconds, part = divmod(ORIGIN_NS + round(when_ms * MS), 10**9)
        ends = ip_address(source).packed + ip_address(host).packed
        length = 40 + payload if payload < 65_000 else 0  # 0: the frame's length tells
        frame = struct.pack(">BBHHHBBH", 0x45, 0, length, number, 0, 64, 6, 0) + ends
        frame += struct.pack(">HHIIBBHHH", 40000, int(port), sent, 0, 0x50, 16, 0, 0, 0)
        sent += payload
        data += struct.pack("<IIII", seconds, part, len(frame), 40 + payload) + frame
    path.write_bytes(data)
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "burst.plan")


@pytest.fixture
def log(tmp_path: Path, plan: Path) -> Path:
    return write_log(tmp_path / "sent.rec", plan)


def verify(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
    assert main(["traffic", "verify", *map(str, arguments), "--json"]) == code
    printed = capsys.readouterr()
    return (json.loads(printed.out) if printed.out else {}), printed.err


def test_what_was_sent_as_planned(plan: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, _ = verify(capsys, plan, "--sent", log)
    assert data["as_planned"] is True
    assert (data["deviations"], data["notes"]) == ([], [])
    assert data["flows"] == {
        "planned": 7, "sent": 7, "finished": 7, "unfinished": 0, "failed": 0, "missing": 0, "repeated": 0, "unknown": 0,
        "open_ended": 0,
    }  # fmt: skip
    assert data["bytes"] == {"planned": 20_309_000, "sent": 20_309_000, "received": 20_309_000}
    whole = data["load"]["whole"]
    assert whole["offered_bps"] == whole["achieved_bps"] == 20_309_000 * 8 / 0.02
    assert data["lateness"] == {
        "launched": 7, "p50_us": 10, "p90_us": 10, "p99_us": 10, "p99.9_us": 10, "max_us": 10, "missed_slots": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("number", "change", "words"),
    [
        (2, None, "1 of 7 flows missing from the log"),
        (2, {"state": 2, "acked_bytes": 5, "finish_ns": 0}, "1 of 7 flows failed"),
        (2, {"state": 1, "acked_bytes": 5, "finish_ns": 0}, "1 of 7 flows unfinished"),
        (2, {"size_bytes": 3001, "sent_bytes": 3001}, "of another size than planned"),
        (2, {"sent_bytes": 2999}, "finished with other bytes than their size"),
        (2, {"flow": 3}, "1 of 7 flows logged more than once"),
        (2, {"flow": 70}, "in the log but not in the plan"),
        (2, {"destination": 1}, "to another destination than planned"),
        (2, {"intended_start_ns": ORIGIN_NS + 4 * MS}, "due at another time than planned"),
    ],
)
def test_each_deviation_is_named_and_exits_1(
    plan: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: int,
    change: dict[str, int] | None,
    words: str,
) -> None:
    rows = [record(at, *flow, **(change or {}) if at == number else {}) for at, flow in enumerate(FLOWS)]
    if change is None:
        del rows[number]
    log = write_log(tmp_path / "sent.rec", plan, rows, destinations=[TO, "127.0.0.1:5002"])
    data, err = verify(capsys, plan, "--sent", log, code=1)
    assert any(words in sentence for sentence in data["deviations"])
    assert words in err
    assert str(plan) in err


def test_timing_alone_fails_nothing(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [record(at, *flow) for at, flow in enumerate(FLOWS)]
    due = ORIGIN_NS + 3 * MS
    rows[2] = record(
        2, 3, 3000, start_ns=due + 5 * MS, first_byte_ns=due + 6 * MS, finish_ns=due + 9 * MS, lateness_ns=5 * MS
    )
    data, _ = verify(capsys, plan, "--sent", write_log(tmp_path / "sent.rec", plan, rows))
    assert data["lateness"]["missed_slots"] == 1
    assert data["lateness"]["max_us"] == 5000


def test_several_logs_are_one_transmission(plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [record(number, *flow) for number, flow in enumerate(FLOWS)]
    one, other = write_log(tmp_path / "a.rec", plan, rows[:3]), write_log(tmp_path / "b.rec", plan, rows[3:])
    data, _ = verify(capsys, plan, "--sent", one, "--sent", other)
    assert data["flows"]["finished"] == 7
    data, _ = verify(capsys, plan, "--sent", one, code=1)
    assert data["deviations"] == ["4 of 7 flows missing from the log"]


def test_open_ended_and_dependent_flows_are_no_deviation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.plan"
    head = {
        "format": "ringtap-flow-plan",
        "version": 2,
        "kind": "long",
        "duration_ns": 20 * MS,
        "flows": 2,
        "bytes": 500,
    }
    path.write_text(json.dumps(head | {"destinations": [TO]}) + f"\n0\t-\t{TO}\t500\t-\n0\t-\t{TO}\t0\t0+1000\n")
    rows = [record(0, 0, 500), record(1, 2, 70_000, state=1)]
    data, _ = verify(capsys, path, "--sent", write_log(tmp_path / "s.rec", path, rows))
    assert (data["flows"]["open_ended"], data["flows"]["unfinished"]) == (1, 1)
    assert any("open-ended" in note for note in data["notes"])


def test_load_in_bins_of_100_ms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3000 and 1000 bytes planned; the second flow starts 95 ms late, in the next bin."""
    plan = write_plan(tmp_path / "p.plan", [(10, 3000), (90, 1000)], kind="consistent", duration_ns=200 * MS)
    due = ORIGIN_NS + 90 * MS
    late = {
        "start_ns": due + 95 * MS,
        "first_byte_ns": due + 95 * MS,
        "finish_ns": due + 96 * MS,
        "lateness_ns": 95 * MS,
    }
    log = write_log(tmp_path / "s.rec", plan, [record(0, 10, 3000), record(1, 90, 1000, **late)])
    data, _ = verify(capsys, plan, "--sent", log, "-o", tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "load.csv")
    assert table["offered_bps"].tolist() == [4000 * 80, 0]
    assert table["launched_bps"].tolist() == [3000 * 80, 1000 * 80]
    assert table["achieved_bps"].tolist() == pytest.approx([3000 * 80, 1000 * 80])
    errors = data["load"]["bins_100ms"]["launched"]
    assert errors == {"error_max": pytest.approx(0.5), "error_rms": pytest.approx(0.5)}


def test_a_plan_of_more_than_a_day_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_plan(tmp_path / "p.plan", [(0.2, 1000)], duration_ns=25 * 3600 * 10**9)
    log = write_log(tmp_path / "s.rec", plan, [record(0, 0.2, 1000)])
    data, _ = verify(capsys, plan, "--sent", log)
    assert data["load"]["whole"]["offered_bps"] == pytest.approx(8000 / (25 * 3600))


def test_completion_slowdown_and_congestion_impact(
    plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every flow takes 1 ms, without congestion 0.25 ms; ideal: 50 µs and 8 bits a byte at 1 Gbit/s."""
    alone = [
        record(at, start, size, finish_ns=ORIGIN_NS + round(start * MS) + 10_000 + MS // 4)
        for at, (start, size) in enumerate(FLOWS)
    ]
    baseline = write_log(tmp_path / "alone.rec", plan, alone)
    data, _ = verify(capsys, plan, "--sent", log, "--baseline", baseline, "--capacity", "1gbit")
    rows = {(row["from_bytes"], row["to_bytes"]): row for row in data["completion"]}
    assert {key: row["flows"] for key, row in rows.items()} == {
        (0, None): 7, (0, 100_000): 5, (100_000, 10_000_000): 1, (10_000_000, None): 1
    }  # fmt: skip
    assert all(row["fct_mean_s"] == row["fct_p99_s"] == pytest.approx(1e-3) for row in rows.values())
    assert all(
        row["congestion_impact_mean"] == row["congestion_impact_p99"] == pytest.approx(4) for row in rows.values()
    )
    assert rows[100_000, 10_000_000]["slowdown_p50"] == pytest.approx(1e-3 / (50e-6 + 300_000 * 8 / 1e9))
    small = [1e-3 / (50e-6 + size * 8 / 1e9) for _, size in FLOWS if size < 100_000]
    assert rows[0, 100_000]["slowdown_mean"] == pytest.approx(np.mean(small))


def as_captured(sizes: list[int]) -> list[tuple[float, int]]:
    """Each flow's bytes and its 16 of header, a little after its start; before the launch, a hello."""
    return [(-5, 44), *((start + 0.05, size + 16) for (start, _), size in zip(FLOWS, sizes, strict=True))]


def test_bytes_in_each_burst_and_quiet_part(
    plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the second burst's 3000 bytes 2880 are in it: 4 % less; of the first quiet part's 3000, 10 % more."""
    sizes = [1000, 2000, 3300, 1500, 1380, 300_000, 20_000_000]
    capture = write_capture(tmp_path / "c.pcap", as_captured(sizes))
    data, _ = verify(capsys, plan, "--sent", log, "--capture", capture, "-o", tmp_path / "out")
    bursts, quiet = data["bursts"]["burst"], data["bursts"]["quiet"]
    assert bursts["windows"] == quiet["windows"] == 2
    assert bursts["error_worst"] == pytest.approx(0.04)
    assert bursts["error_median"] == pytest.approx(0.02)
    assert bursts["signed_median"] == pytest.approx(-0.02)
    assert bursts["share_within_5_percent"] == 1
    assert quiet["error_worst"] == pytest.approx(0.1)
    assert quiet["share_within_5_percent"] == 0.5
    table = pd.read_csv(tmp_path / "out" / "windows.csv")
    assert table["planned_bytes"].tolist() == [3000, 3000, 3000, 20_300_000]
    assert table["wire_bytes"].tolist() == [3000, 3300, 2880, 20_300_000]
    whole = data["load"]["whole"]
    assert whole["capture_bytes"] == 44 + sum(sizes)  # the hello is on the wire too
    assert whole["capture_error"] == pytest.approx((44 + 180) / 20_309_000)


def test_only_the_plan_s_ends_count_in_a_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_plan(tmp_path / "p.plan", sources=["10.0.0.7"])
    plan.write_text(plan.read_text().replace("\t-\t127", "\t10.0.0.7\t127"))
    log = write_log(tmp_path / "s.rec", plan)
    ours = write_capture(tmp_path / "a.pcap", as_captured([size for _, size in FLOWS]), source="10.0.0.7").read_bytes()
    others = write_capture(tmp_path / "b.pcap", [(5, 999)]).read_bytes()
    elsewhere = write_capture(tmp_path / "c.pcap", [(5, 999)], to="127.0.0.1:5002", source="10.0.0.7").read_bytes()
    capture = tmp_path / "all.pcap"
    capture.write_bytes(ours + others[24:] + elsewhere[24:])
    data, _ = verify(capsys, plan, "--sent", log, "--capture", capture)
    assert data["load"]["whole"]["capture_bytes"] == 44 + 20_309_000


def test_a_source_may_be_the_name_of_a_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_plan(tmp_path / "p.plan", sources=["localhost"])
    plan.write_text(plan.read_text().replace("\t-\t127", "\tlocalhost\t127"))
    log = write_log(tmp_path / "s.rec", plan)
    capture = write_capture(tmp_path / "c.pcap", as_captured([size for _, size in FLOWS]))
    data, _ = verify(capsys, plan, "--sent", log, "--capture", capture)
    assert data["load"]["whole"]["capture_bytes"] == 44 + 20_309_000


def test_clocks_that_differ_are_said(plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packets 50 µs after the starts are 30 µs after the first bytes; then 400 µs more."""
    packets = as_captured([size for _, size in FLOWS])
    data, _ = verify(capsys, plan, "--sent", log, "--capture", write_capture(tmp_path / "a.pcap", packets))
    assert (data["clock_offset_us"], data["notes"]) == (pytest.approx(30), [])
    shifted = [(when + 0.4, size) for when, size in packets]
    data, _ = verify(capsys, plan, "--sent", log, "--capture", write_capture(tmp_path / "b.pcap", shifted))
    assert data["clock_offset_us"] > 100
    assert any("clocks of log and capture differ" in note for note in data["notes"])


def test_a_capture_cut_short_is_said(plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = write_capture(tmp_path / "c.pcap", as_captured([size for _, size in FLOWS]))
    capture.write_bytes(capture.read_bytes()[:-10])
    data, _ = verify(capsys, plan, "--sent", log, "--capture", capture)
    assert any("ends within a packet" in note for note in data["notes"])


def test_copies_of_packets_count_once(
    plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = write_capture(tmp_path / "c.pcap", as_captured([size for _, size in FLOWS]))
    twice = tmp_path / "any.pcap"
    twice.write_bytes(captured_twice(once.read_bytes()))
    found = [verify(capsys, plan, "--sent", log, "--capture", path)[0] for path in (once, twice)]
    assert found[0]["load"] == found[1]["load"]
    assert found[0]["notes"] == []
    (note,) = found[1]["notes"]
    assert "any.pcap holds 10 copies of packets" in note
    assert note.endswith("each packet counts once")


def nic_log(path: Path, samples: list[tuple[float, int, int]], width_bits: int = 64, set_ns: int = 0) -> Path:
    """Interface eth0 sent so many bytes in so many packets by so many ms after the launch, when the clock is set."""
    names = [f"eth0.{way}_{what}" for what in ("bytes", "packets", "errors", "drops") for way in ("rx", "tx")]
    fields = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
    writer = RecordWriter(path, [*fields, *(Field(name, "<u8", "", "counter", width_bits) for name in names)], {})
    for when_ms, total, packets in samples:
        values = (value % 2**width_bits for value in (7, 1000 + total, 0, 10 + packets, 0, 0, 0, 0))
        at_ns = round(when_ms * MS)
        writer.append(ORIGIN_NS + at_ns + (set_ns if when_ms > 0 else 0), 10**12 + at_ns, *values)
    writer.close()
    return path


@pytest.mark.parametrize(("before", "width_bits"), [(0, 64), (2**32 - 5000, 32)], ids=["plain", "wrap"])
def test_interface_counters_less_headers(
    plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: int, width_bits: int
) -> None:
    samples = [(-10, before, 0), (10, before + 6000 + 66 * 3, 3), (130, before + 20_309_000 + 66 * 7, 7)]
    nic = nic_log(tmp_path / "nic.rec", samples, width_bits)
    data, _ = verify(capsys, plan, "--sent", log, "--nic", nic, "--interface", "eth0", "-o", tmp_path / "out")
    assert data["load"]["whole"]["nic_bytes"] == pytest.approx(20_309_000, rel=0.1)
    assert data["load"]["bins_100ms"]["nic"]["error_max"] is not None
    assert any("eth0 counted tx" in note for note in data["notes"])
    assert "bursts" not in data  # counters every 10 ms cannot tell a burst of 1 ms


@pytest.mark.parametrize("set_ns", [0, -(10**10), 10**10])
def test_a_clock_that_is_set_while_flows_are_sent_moves_no_counter(
    plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], set_ns: int
) -> None:
    samples = [(-10, 0, 0), (10, 6000 + 66 * 3, 3), (20, 9000 + 66 * 5, 5), (130, 20_309_000 + 66 * 7, 7)]
    nic = nic_log(tmp_path / "nic.rec", samples, set_ns=set_ns)
    out = tmp_path / "out"
    data, _ = verify(capsys, plan, "--sent", log, "--nic", nic, "--interface", "eth0", "-o", out)
    # up to 100 ms after the plan's end, that is 100 of the 110 ms between the last two samples
    assert data["load"]["whole"]["nic_bytes"] == pytest.approx(9000 + 20_300_000 * 100 / 110)
    bins = pd.read_csv(out / "load.csv")
    assert bins["nic_bps"].tolist() == pytest.approx([(9000 - 3000) * 8 / 0.02])


@pytest.mark.parametrize(("ends_ms", "is_long_enough"), [(420, True), (300, False)])
def test_counters_reach_to_the_last_flow_that_finishes(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ends_ms: float, is_long_enough: bool
) -> None:
    """The last flow of a plan of 20 ms finishes after 319 ms, and its last packets are counted after 400 ms."""
    rows = [record(number, *flow) for number, flow in enumerate(FLOWS[:-1])]
    rows.append(record(6, *FLOWS[-1], finish_ns=ORIGIN_NS + 319 * MS))
    log, whole = write_log(tmp_path / "late.rec", plan, rows), 20_309_000
    samples = [(at_ms, whole * at_ms // 400 + 66 * at_ms, at_ms) for at_ms in range(0, 401, 10)]
    samples = [(-10, 0, 0), *(one for one in samples if one[0] <= ends_ms), (ends_ms, *samples[-1][1:])]
    nic = nic_log(tmp_path / "nic.rec", samples)
    arguments = [plan, "--sent", log, "--nic", nic, "--interface", "eth0"]
    if not is_long_enough:
        assert "does not reach from the launch to the end of the plan" in verify(capsys, *arguments, code=2)[1]
        return
    whole_plan = verify(capsys, *arguments)[0]["load"]["whole"]
    assert whole_plan["over_s"] == pytest.approx(0.319)
    assert whole_plan["nic_error"] == pytest.approx(0, abs=1e-6)


def test_bins_in_which_counters_were_read_too_rarely_are_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path / "long.plan", duration_ns=1000 * MS)
    log = write_log(tmp_path / "long.rec", plan)
    at_ms = [*range(-10, 401, 10), *range(700, 1121, 10)]  # nothing was read for 300 ms
    nic = nic_log(tmp_path / "nic.rec", [(one, 1000 * (one + 10), 0) for one in at_ms])
    out = tmp_path / "out"
    data, _ = verify(capsys, plan, "--sent", log, "--nic", nic, "--interface", "eth0", "-o", out)
    known = pd.read_csv(out / "load.csv")["nic_bps"]
    assert known.isna().tolist() == [False] * 4 + [True] * 3 + [False] * 3
    assert known.dropna().tolist() == pytest.approx([8e6] * 7)
    assert data["load"]["whole"]["nic_bytes"] == pytest.approx(1_100_000), "counters go on while nobody reads them"
    assert data["load"]["bins_100ms"]["nic"]["error_max"] is not None


@pytest.mark.parametrize(
    ("to", "headers", "words"),
    [
        (["[::1]:5001"], 86, "86 B per packet subtracted"),
        (["[::1]:5001", TO], 66, "which of the 8 packets are IPv6 is not known: the payload is up to 160 bytes less"),
    ],
)
def test_headers_are_those_of_the_plan_s_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: list[str], headers: int, words: str
) -> None:
    plan = write_plan(tmp_path / "p.plan", destinations=to)
    plan.write_text(plan.read_text().replace(f"-\t{TO}", f"-\t{to[0]}"))
    log = write_log(tmp_path / "s.rec", plan)
    samples = [(-10, 0, 0), (10, 6000 + headers * 3, 3), (120, 9000 + headers * 8, 8)]
    nic = nic_log(tmp_path / "nic.rec", samples)
    data, _ = verify(capsys, plan, "--sent", log, "--nic", nic, "--interface", "eth0")
    assert data["load"]["whole"]["nic_bytes"] == 9000
    assert any(words in note for note in data["notes"]), data["notes"]


def test_figures_and_tables_hold_the_numbers(
    plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capture = write_capture(tmp_path / "c.pcap", as_captured([size for _, size in FLOWS]))
    out = tmp_path / "out"
    command = [plan, "--sent", log, "--capture", capture, "--compare", log, "-o", out]
    verify(capsys, *command)
    names = {"verify.json", "summary.csv", "figures.md", "load.csv", "completion.csv", "windows.csv"}
    names |= {f"{name}.{kind}" for name in ("plan", "trace", "rates") for kind in ("png", "svg", "csv")}
    assert {path.name for path in out.iterdir()} == names
    written = json.loads((out / "verify.json").read_text())
    assert set(written["figures"]) == {"plan", "trace", "rates"}
    assert "Mbit/s" in written["figures"]["trace"] or "Gbit/s" in written["figures"]["trace"]
    flows = pd.read_csv(out / "plan.csv")
    assert flows["size_bytes"].tolist() == [size for _, size in FLOWS]
    assert flows["in_burst"].tolist() == [True, True, False, True, True, False, False]
    summary = pd.read_csv(out / "summary.csv").set_index("number")["value"]
    assert summary["bytes.received"] == "20309000"
    rates = pd.read_csv(out / "rates.csv")
    heights = rates[[name for name in rates if name.endswith("height")]]
    assert heights.to_numpy().max() == 1
    assert (out / "plan.png").read_bytes()[:4] == b"\x89PNG"
    verify(capsys, *command, code=2)
    verify(capsys, *command, "--force")


def test_the_moving_average_is_over_one_burst(
    plan: Path, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2000 bytes at once are 16 Mbit/s for a millisecond about it."""
    capture = write_capture(tmp_path / "c.pcap", [(5, 2000)])
    verify(capsys, plan, "--sent", log, "--capture", capture, "-o", tmp_path / "out")
    trace = pd.read_csv(tmp_path / "out" / "trace.csv")
    near = trace[(trace["time_ns"] > 4.6 * MS) & (trace["time_ns"] < 5.4 * MS)]
    assert len(near) >= 14
    assert (near["rate_bps"] == 16e6).all()
    assert (trace[(trace["time_ns"] > 6 * MS) & (trace["time_ns"] < 9 * MS)]["rate_bps"] == 0).all()


def test_the_last_period_of_a_plan_keeps_its_shape(tmp_path: Path) -> None:
    windows = burst_windows(read_plan(write_plan(tmp_path / "p.plan", duration_ns=25 * MS)))
    assert windows is not None
    assert (windows.edges_ns / MS).tolist() == [0, 1, 10, 11, 20, 20.5, 25]
    assert windows.burst.tolist() == [True, False] * 3


HEAD = '{"format": "ringtap-flow-plan", "version": 2, "duration_ns": 1000000, "flows": 1, "bytes": 5, '
HEAD += f'"destinations": ["{TO}"]}}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[]\n", "does not say format"),
        ('{"format": "ringtap-flow-plan", "version": 9}\n', "upgrade"),
        ('{"format": "ringtap-flow-plan", "version": 2}\n', "duration_ns must be"),
        (HEAD.replace("1000000", str(2**62)) + "1\t-\tTO\t5\t-\n", "plans of a week at most are compared"),
        ("HEAD1\t-\n", "line 2: a flow is five columns"),
        ("HEADx\t-\tTO\t5\t-\n", "line 2: start_ns 'x' is not a whole number"),
        ("HEAD1\t-\tTO\t99999999999999999999\t-\n", "line 2: size_bytes '99999999999999999999' is too large"),
        ("HEAD1\t-\telsewhere:1\t5\t-\n", "not among the header's"),
        ("HEAD1\t-\tTO\t5\t-\n1\t-\tTO\t5\t-\n", "cut short or edited"),
        ("HEAD", "cut short or edited"),
        ("HEAD1\t-\tTO\t5\t-\t9\n", "line 2: a flow is five columns"),
    ],
)
def test_a_bad_plan_is_refused_in_a_sentence(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "bad.plan"
    path.write_text(text.replace("HEAD", HEAD).replace("TO", TO))
    _, err = verify(capsys, path, "--sent", log, code=2)
    assert words in err
    assert err.count("\n") == 1


def test_what_is_no_log_or_lacks_something_is_refused(plan: Path, log: Path, tmp_path: Path, capsys: Any) -> None:
    receiver = write_log(tmp_path / "r.rec", plan, source="receiver")
    nic = nic_log(tmp_path / "nic.rec", [(-10, 0, 0), (10, 0, 0)])
    old = write_log(tmp_path / "old.rec", plan, origin_monotonic_ns="?")
    last_ns = 2**63 - 1
    late = write_log(tmp_path / "late.rec", plan, origin_monotonic_ns=last_ns)
    never = write_log(tmp_path / "never.rec", plan, origin_monotonic_ns=last_ns + 1)
    reset = nic_log(tmp_path / "reset.rec", [(-10, 900, 9), (10, 6000, 3), (60, 100, 0), (130, 20_309_000, 7)])
    capture = write_capture(tmp_path / "c.pcap", [(1, 100)], to="127.0.0.1:9")
    for arguments, words in [
        (["--sent", tmp_path / "none.rec"], "No such file"),
        (["--sent", plan], "not a ringtap record file"),
        (["--sent", receiver], "not a log of 'ringtap traffic send'"),
        (["--sent", log, "--capture", log], "is not a capture"),
        (["--sent", log, "--capture", capture], "no payload to"),
        (["--sent", log, "--nic", nic], "go together"),
        (["--sent", log, "--nic", nic, "--interface", "eth1"], "no interface 'eth1', but eth0"),
        (["--sent", log, "--nic", nic, "--interface", "eth0"], "does not reach"),
        (["--sent", log, "--nic", reset, "--interface", "eth0"], "a tx counter of eth0 was reset while the plan"),
        (["--sent", old, "--nic", nic, "--interface", "eth0"], "old.rec lacks origin_monotonic_ns"),
        (["--sent", never, "--nic", nic, "--interface", "eth0"], "never.rec lacks origin_monotonic_ns"),
        (["--sent", late, "--nic", nic, "--interface", "eth0"], "does not reach"),
        (["--sent", log, "--capacity", "0gbit"], "above 0"),
        (["--sent", log, "-o", log / "x"], "cannot be written"),
        ([], "--sent"),
    ]:
        _, err = verify(capsys, plan, *arguments, code=2)
        assert words in err
        assert err.count("\n") == 1


def test_plans_of_version_1_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.plan"
    path.write_text(HEAD.replace('"version": 2', '"version": 1') + f"20000\t{TO}\t5\n")
    data, _ = verify(capsys, path, "--sent", write_log(tmp_path / "s.rec", path, [record(0, 0.02, 5)]))
    assert data["as_planned"] is True


def test_a_log_that_was_cut_off_is_read_to_there(plan: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_bytes(log.read_bytes()[:-5])
    data, _ = verify(capsys, plan, "--sent", log, code=1)
    assert data["flows"]["missing"] == 1
    assert any("torn" in note for note in data["notes"])


@pytest.mark.parametrize("verb", ["verify", "plan"])
def test_without_the_analysis_one_sentence_says_what_to_install(plan: Path, log: Path, verb: str) -> None:
    arguments = {
        "verify": [str(plan), "--sent", str(log)],
        "plan": ["--kind", "replay", "--replay", "x.pcap", "--to", "h:1", "--summary"],
    }
    code = "import sys; sys.modules['numpy'] = sys.modules['pandas'] = None\nfrom ringtap.cli import main\n"
    code += f"sys.exit(main(['traffic', {verb!r}, *{arguments[verb]!r}]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not installed here: " in done.stderr
    assert "[report]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_single_file_says_that_it_cannot_verify(plan: Path, log: Path, tmp_path: Path) -> None:
    archive = tmp_path / "ringtap-traffic.pyz"
    write_archive(archive)
    command = [sys.executable, "-I", "-S", str(archive), "verify", str(plan), "--sent", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "ringtap: this copy of ringtap has no analysis: run the command where all of ringtap is installed\n"
    )
