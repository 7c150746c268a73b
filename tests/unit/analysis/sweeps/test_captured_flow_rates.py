"""Packets of a sweep, from made-up captures with known rates, to the numbers, figures and sentences of the report."""

from __future__ import annotations

import json
import math
import socket
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.analysis.plots.figure import styled
from ringtap.analysis.report import sweep_packets_section as section
from ringtap.analysis.report.write import write_report
from ringtap.analysis.runs.run import read_run
from ringtap.analysis.structure.flow_roles_and_rates import CROSSING
from ringtap.analysis.sweeps.captured_flow_rates import BIN_NS, CapturedPoint, captured_points, decrease
from ringtap.analysis.sweeps.points import measure
from ringtap.core.append_only_logs import read_json_lines
from ringtap.core.flow_plan_format import Flow
from ringtap.core.run_directory import write_json
from ringtap.core.thesis_neural_networks import PROFILES
from ringtap.core.units import format_size
from tests.gold.analysis_sweep import edit_info, write_sweep
from tests.unit.capture_makers import Packet, classic
from tests.unit.traffic_processes import plan_of

pytestmark = pytest.mark.shares

ADDRESSES = {
    host: (f"10.77.0.{number}", f"10.78.0.{number}") for number, host in enumerate(("S0", "S1", "S2", "S3"), 1)
}
SCALE = 100
DEMAND_BYTES = demand(round(PROFILES["resnet50"].parameters / SCALE), 3).worker_bytes
SEGMENT_BYTES = 1448
MS = 1_000_000
EXCHANGE_MS = 100  # of an iteration: training at the bottleneck, in bins of 10 ms with heavy or light cross traffic
LIGHT, HEAVY = 30_000, 90_000  # cross traffic in a bin, in bytes


def frames(
    source: str, destination: str, ports: tuple[int, int], times_ns: np.ndarray, sizes: np.ndarray
) -> list[Packet]:
    """TCP packets with payload of these sizes; the payload itself is not kept."""
    found, sequence = [], 1
    for at_ns, size in zip(times_ns.tolist(), sizes.tolist(), strict=True):
        ip = struct.pack(
            "!BBHHHBBH4s4s", 0x45, 0, 40 + size, 0, 0, 64, 6, 0, socket.inet_aton(source), socket.inet_aton(destination)
        )
        tcp = struct.pack("!HHIIBBHHH", *ports, sequence % 2**32, 1, 0x50, 0x10, 1000, 0, 0)
        found.append(Packet(at_ns, bytes(12) + b"\x08\0" + ip + tcp, 54 + size))
        sequence += size
    return found


def spread(total: float, begin_ns: int, length_ms: int) -> tuple[np.ndarray, np.ndarray]:
    """Times and sizes of segments that carry a number of bytes evenly over a time."""
    count = int(total // SEGMENT_BYTES)
    sizes = np.array([SEGMENT_BYTES] * count + [round(total - count * SEGMENT_BYTES)])
    return begin_ns + (np.arange(count + 1) * (length_ms * MS / (count + 1))).astype(np.int64), sizes


def write_capture(folder: Path, nic: str, packets: list[Packet], span: tuple[int, int], dropped: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"001-{nic}-0.pcap").write_bytes(classic(sorted(packets, key=lambda one: one.time_ns), nano=True))
    facts = {"interface": nic, "files": [f"001-{nic}-0.pcap"], "begin_ns": span[0], "end_ns": span[1]}
    write_json(folder / f"001-{nic}.json", facts | {"dropped_by_kernel": dropped, "dropped_by_interface": 0})


def captured_sweep(path: Path, volume: float = DEMAND_BYTES) -> list[int]:
    """A sweep with one captured point; returns the ends of the iterations that were captured.

    In each, S3 sends in 50 ms what S1 sends in 100 ms, at a third of the rate where cross traffic is heavy. One segment
    of S3 is sent twice. One of S0 is lost before the capture point, and captured when it is sent again.
    """
    write_sweep(path, [("resnet50", "consistent")], loads_gbps=(0.0, 7.5), iterations=24)
    lines = read_json_lines(path / "points.jsonl")[0]
    times = read_run(path).job(lines[1]["directory"]).iterations
    start, end = lines[1]["window_start_ns"], lines[1]["window_end_ns"]
    times = times[(times["start_ns"] >= start) & (times["end_ns"] <= end)].head(10)
    lines[1] |= {"packets_start_ns": int(times["start_ns"].iloc[0]), "packets_end_ns": int(times["end_ns"].iloc[-1])}
    lines[1] |= {"requested_bps": 75_000_000, "packets_why": ""}
    (path / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    hosts = {
        host: {"training": one, "cross": two, "training_nic": "eth0" if host != "S2" else "", "cross_nic": "cross0"}
        for host, (one, two) in ADDRESSES.items()
    }
    edit_info(path, capture={"interfaces": {}, "hosts": hosts})
    flows: dict[tuple[str, str], list[Packet]] = {}
    parts: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    bins_ms = np.arange(0, EXCHANGE_MS, 10)
    for begin in times["start_ns"]:
        origin = -(-(int(begin) - int(times["start_ns"].iloc[0])) // (10 * MS)) * 10 * MS + int(
            times["start_ns"].iloc[0]
        )
        parts.setdefault(("S3", "S1"), []).append(spread(volume, origin, EXCHANGE_MS // 2))
        parts.setdefault(("S0", "S3"), []).append(spread(volume, origin, EXCHANGE_MS))
        for at_ms in bins_ms.tolist():
            is_heavy = at_ms // 10 % 2
            share = (0.05 if is_heavy else 0.15) * volume
            parts.setdefault(("S1", "S0"), []).append(spread(share, origin + at_ms * MS, 10))
            cross = HEAVY if is_heavy else LIGHT
            parts.setdefault(("S2", "S0"), []).append(spread(cross, origin + at_ms * MS, 10))
    for number, (pair, made) in enumerate(parts.items()):
        sent_at, sizes = (np.concatenate(columns) for columns in zip(*made, strict=True))
        side = 1 if "S2" in pair else 0
        flows[pair] = frames(ADDRESSES[pair[0]][side], ADDRESSES[pair[1]][side], (1000 + number, 2000), sent_at, sizes)
    again = flows["S3", "S1"][5]
    flows["S3", "S1"].insert(7, Packet(flows["S3", "S1"][6].time_ns + 1000, again.data, again.length))
    late = flows["S0", "S3"][5]
    flows["S0", "S3"][5] = Packet(late.time_ns + 20 * MS, late.data, late.length)
    job, span = path / lines[1]["directory"], (lines[1]["packets_start_ns"], lines[1]["packets_end_ns"])
    for host in ("S0", "S2", "S3"):
        mine = [packet for pair, packets in flows.items() if host in pair for packet in packets]
        write_capture(job / "nodes" / host / "packets", "eth0", mine, span, dropped=3 if host == "S2" else 0)
    through = [packet for pair in (("S1", "S0"), ("S2", "S0")) for packet in flows[pair]]
    write_capture(job / "nodes" / "switch" / "packets", "to-S0", through, span)
    return [span[0], *times["end_ns"].tolist()]


def read(path: Path) -> list[CapturedPoint]:
    sweep = read_run(path)
    return captured_points(sweep, measure(sweep))


def test_flows_are_told_apart_and_read_where_they_are_sent(tmp_path: Path) -> None:
    edges = captured_sweep(tmp_path / "sweep")
    (found,) = read(tmp_path / "sweep")
    assert [(flow.role, flow.source, flow.destination, flow.place) for flow in found.flows] == [
        ("training only", "S3", "S1", "S3"),
        ("training beside cross traffic", "S1", "S0", "S0"),
        ("cross traffic", "S2", "S0", "S2"),
    ]
    assert found.edges_ns.tolist() == edges
    assert found.load == pytest.approx(0.3)
    assert found.dropped == 3
    assert found.mean_s == pytest.approx((edges[-1] - edges[0]) / 10e9)


def test_packets_and_iterations_are_by_one_clock(tmp_path: Path) -> None:
    """All hosts' clocks are 50 ms ahead of the reference, in steps as in packets."""
    captured_sweep(tmp_path / "sweep")
    (expected,) = read(tmp_path / "sweep")
    fit = {"t0_ns": 0, "offset_ns": 50 * MS, "drift_ppm": 0.0, "error_ns": 1000}
    for node in (tmp_path / "sweep").glob("series/*/nodes/*"):
        (node / "clock").mkdir()
        write_json(node / "clock" / "clock.json", {"reference": "other", "fit": fit})
    (found,) = read(tmp_path / "sweep")
    assert (expected.edges_ns - found.edges_ns).tolist() == [50 * MS] * len(expected.edges_ns)
    for flow, same in zip(found.flows, expected.flows, strict=True):
        assert (flow.role, flow.payload.tolist()) == (same.role, same.payload.tolist())
    assert found.training_backoff == expected.training_backoff
    assert found.bytes == expected.bytes


def test_the_flow_alone_is_faster_by_what_it_is_faster(tmp_path: Path) -> None:
    captured_sweep(tmp_path / "sweep")
    (found,) = read(tmp_path / "sweep")
    # twice the rate, less the ends of the moving averages of 3 ms, and 50 against 100 ms
    assert found.oversupply == pytest.approx(1.0, abs=0.08)


def test_how_far_training_backs_off(tmp_path: Path) -> None:
    captured_sweep(tmp_path / "sweep")
    (found,) = read(tmp_path / "sweep")
    ratio = found.training_backoff
    assert ratio is not None
    # a third of the rate; a segment may lie in the bin beside its own
    assert ratio.value == pytest.approx(2 / 3, abs=0.01)
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.bins == 100, "ten bins of exchange in each of ten iterations"
    assert found.cross_backoff is None, "without training there is no cross traffic here"


@pytest.mark.parametrize("blocks", [3, 10])
def test_the_interval_of_a_decrease_holds_the_truth(blocks: int) -> None:
    """Of two thirds, where the rates of blocks scatter by 15 % and those of bins by 40 %."""
    random, held, cases = np.random.default_rng(4), 0, 400
    block, condition = np.repeat(np.arange(blocks), 10), np.tile([True, False], 5 * blocks)
    for _ in range(cases):
        rates = np.where(condition, 1000, 3000) * random.lognormal(0, 0.15, blocks)[block]
        found = decrease((rates * random.lognormal(0, 0.4, len(block))).astype(np.int64), condition, block)
        assert found is not None
        held += found.low <= 2 / 3 <= found.high
    # 95 %, less three standard deviations of a share of 400 cases
    assert held / cases >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / cases)


def test_a_condition_in_one_block_alone_has_no_decrease() -> None:
    condition = np.array([True, False, False, False])
    assert decrease(np.array([1, 2, 2, 2]), condition, np.array([0, 0, 1, 1])) is None
    assert decrease(np.array([1, 2, 1, 2]), condition, np.array([0, 0, 0, 0])) is None


def test_training_bytes_leave_out_what_was_sent_again(tmp_path: Path) -> None:
    captured_sweep(tmp_path / "sweep")
    (found,) = read(tmp_path / "sweep")
    counted = found.bytes
    assert counted is not None
    assert counted.workers == ("S0", "S3")
    assert counted.packets == pytest.approx(SCALE * DEMAND_BYTES, rel=1e-5)
    assert counted.equation == pytest.approx(SCALE * DEMAND_BYTES)
    assert counted.interfaces is None
    assert counted.sockets is None
    assert counted.reasons["interfaces"] == "S3: the counters of eth0 were not recorded"
    assert counted.reasons["sockets"] == "S0: no sockets were recorded"
    assert counted.largest_difference == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("collective", "packets", "says"),
    [
        ("tree", SCALE * DEMAND_BYTES, {"equation": "the equation is of a ring, and tree exchanged the gradients"}),
        (
            "parameter-server",
            None,
            {"sockets": "with parameter-server, workers send nothing to each other"},
        ),
    ],
)
def test_other_collectives_are_not_compared_with_a_ring(
    tmp_path: Path, collective: str, packets: float | None, says: dict[str, str]
) -> None:
    path = tmp_path / "sweep"
    captured_sweep(path)
    lines = [line | {"collective": collective} for line in read_json_lines(path / "points.jsonl")[0]]
    (path / "points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = read(path)
    counted = found.bytes
    assert counted is not None
    assert counted.packets == (None if packets is None else pytest.approx(packets, rel=1e-5))
    assert counted.equation is None
    assert says.items() <= counted.reasons.items()


def test_packets_that_were_dropped_are_not_known_without_a_count(tmp_path: Path) -> None:
    path = tmp_path / "sweep"
    captured_sweep(path)
    for facts in path.glob("series/*/nodes/S2/packets/*.json"):
        item = json.loads(facts.read_text())
        facts.write_text(json.dumps({name: value for name, value in item.items() if "dropped" not in name}))
    assert read(path)[0].dropped is None
    written = write_report(path)
    assert "How many packets the captures dropped is not known." in written.paths[0].read_text()


def test_legends_stay_within_their_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured_sweep(tmp_path / "sweep")
    (found,) = read(tmp_path / "sweep")
    plan = plan_of(tmp_path / "p.plan", [Flow(at * MS, "", "10.78.0.1:5000", 1000) for at in range(3000)], 3_000 * MS)
    monkeypatch.setattr(section, "read_sent", lambda _: SimpleNamespace(origin_ns=found.start_ns))
    one, other = replace(found, flow_plan=plan), replace(found, point=replace(found.point, traffic="burst"))
    for drawn in (section.histogram([one, other]), section.traces([one])):
        assert drawn is not None
        with styled():
            renderer = FigureCanvasAgg(drawn.figure).get_renderer()
            for axes in drawn.figure.axes:
                if (legend := axes.get_legend()) is not None:
                    box = legend.get_window_extent(renderer)
                    assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1
                    assert axes.bbox.y0 <= box.y0 <= box.y1 <= axes.bbox.y1
        assert drawn.keys, "the kinds and lines are named below the panels"


def test_the_mean_of_a_trace_is_that_of_all_captured_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured_sweep(tmp_path / "sweep")
    (found,) = read(tmp_path / "sweep")
    flow = found.flow(CROSSING)
    assert flow is not None
    flow.payload[-1] += 10_000_000  # also of the last bin
    plan = plan_of(tmp_path / "p.plan", [Flow(at * MS, "", "10.78.0.1:5000", 1000) for at in range(3000)], 3_000 * MS)
    monkeypatch.setattr(section, "read_sent", lambda _: SimpleNamespace(origin_ns=found.start_ns))
    drawn = section.traces([replace(found, flow_plan=plan)])
    assert drawn is not None
    axes = drawn.figure.axes[0]
    size = {"payload in Mbit/s": 1e6, "payload in Gbit/s": 1e9}[axes.get_ylabel()]
    expected_bps = flow.payload.sum() * found.scale * 8e9 / (len(flow.payload) * BIN_NS)
    assert axes.lines[0].get_ydata()[0] * size == pytest.approx(expected_bps)


@pytest.mark.parametrize(("factor", "verdict"), [(1.015, "agree"), (1.03, "do not agree")])
def test_the_report_says_if_the_counts_agree(tmp_path: Path, factor: float, verdict: str) -> None:
    captured_sweep(tmp_path / "sweep", factor * DEMAND_BYTES)
    written = write_report(tmp_path / "sweep")
    (item,) = json.loads(written.json_path.read_text())["packets"]
    assert f"they {verdict} within 2 %" in item["agreement"]
    assert item["agreement"] in written.summary
    size = format_size(demand(PROFILES["resnet50"].parameters, 3).worker_bytes)
    assert f"equation 3.1 {size}" in item["agreement"], "as in the section of the demand"
    assert item["bytes"]["agree"] is (factor < 1.02)
    assert item["bytes"]["header_share"] == pytest.approx(factor - 1, abs=1e-3)
    assert (item["thesis"]["alone_gbps"], item["thesis"]["shared_gbps"]) == (8.42, 8.40)
    page = (written.json_path.parent / "report.html").read_text()
    assert 'id="packets"' in page
    for name in ("packets-histogram", "packets-flows"):
        assert f'id="figure-{name}"' in page
        assert (written.json_path.parent / "figures" / f"{name}.png").stat().st_size > 1000
    assert not (written.json_path.parent / "figures" / "packets-trace.png").exists(), "there is no flow plan"


def test_missing_packets_have_a_reason(tmp_path: Path) -> None:
    captured_sweep(tmp_path / "sweep")
    lines = read_json_lines(tmp_path / "sweep" / "points.jsonl")[0]
    for path in (tmp_path / "sweep" / lines[1]["directory"]).glob("nodes/*/packets/*"):
        path.unlink()
    lines[0] |= {"packets_why": "the packet capture on S0 does not start: no space left"}
    (tmp_path / "sweep/points.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    failed, removed = read(tmp_path / "sweep")
    assert failed.why == "the packet capture on S0 does not start: no space left"
    assert removed.why == "the packets are not in the run directory"
    assert [one.mean_s for one in (failed, removed)] == [None, None]
    data = json.loads(write_report(tmp_path / "sweep").json_path.read_text())["packets"]
    assert [one["agreement"] for one in data] == [f"no packets: {one.why}." for one in (failed, removed)]
