"""A sender's log and summary: times in order, figures that follow from the log."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.traffic.delivered import from_log
from ringtap.analysis.traffic.flow_logs import read_sent
from ringtap.analysis.traffic.verify import completion, load
from ringtap.core.append_only_logs import open_records
from ringtap.core.flow_plan_format import Flow
from ringtap.core.flow_plan_table import read_plan
from tests.unit.traffic_processes import MS, by_flow, plan_of, send, serving, traffic

pytestmark = [pytest.mark.shares, pytest.mark.together]

LINE_BPS = 10e9
# Of every size class; the largest are sent last, so that the small ones have some peace
SIZES = (20_000,) * 150 + (300_000, 700_000) * 20 + (11_000_000, 12_000_000)


def mixed_plan(folder: Path, *addresses: str) -> Path:
    flows = [Flow(2 * at * MS, "", addresses[at % len(addresses)], size) for at, size in enumerate(SIZES)]
    return plan_of(folder / "mixed.plan", flows, 400 * MS)


@pytest.fixture(scope="module", params=["kept", "new"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path, dict[str, Any]]:
    """A summary, the log, and what its run as a baseline of another one gives."""
    folder = tmp_path_factory.mktemp(request.param)
    with serving() as serve:
        plan = mixed_plan(folder, serve.address)
        options = ("--connections", request.param, "--capacity", "10gbit", "--workers", 2)
        summary, _ = send(plan, "--log", folder / "s.rec", *options)
        second, _ = send(plan, "--log", folder / "again.rec", "--baseline", folder / "s.rec", *options)
    return summary, folder / "s.rec", second | {"log": folder / "again.rec"}


Run = tuple[dict[str, Any], Path, dict[str, Any]]


def nearest_rank(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def completion_s(row: dict[str, Any]) -> float:
    return float(row["finish_ns"] - row["start_ns"]) / 1e9


def test_times_are_in_order_and_the_kernels_figures_plausible(run: Run) -> None:
    summary, log, _ = run
    sent = by_flow(log)
    assert len(sent) == len(SIZES)
    for row in sent:
        assert row["intended_start_ns"] <= row["start_ns"] <= row["first_byte_ns"] < row["finish_ns"]
        # The receiver's clock is this host's; a step of it between would be seen in the summary
        assert row["first_byte_ns"] < row["received_ns"] <= row["finish_ns"] + abs(summary["clock_step_s"]) * 1e9 + 1000
        assert row["lateness_ns"] == row["start_ns"] - row["intended_start_ns"]
        assert row["sent_bytes"] == row["acked_bytes"] == row["size_bytes"]
        # Loopback takes 10 µs or so, and behind megabytes in the same process's buffers some ms
        assert 0 < row["rtt_us"] < 500_000
    assert sum(row["retransmits"] for row in sent) == summary["retransmits"]
    assert summary["retransmits"] < 100  # loopback loses nothing; probes of the tail may send a segment twice


def test_the_totals_follow_from_the_log(run: Run) -> None:
    summary, log, _ = run
    sent = by_flow(log)
    assert summary["flows"] == summary["finished"] == len(sent)
    assert summary["bytes"] == summary["acked_bytes"] == sum(SIZES)
    assert summary["duration_s"] == pytest.approx(0.4)
    assert summary["offered_bps"] == pytest.approx(sum(SIZES) * 8 / 0.4)
    origin_ns = open_records(log).about["origin_ns"]
    last_s = max(0.4, (max(row["finish_ns"] for row in sent) - origin_ns) / 1e9)
    assert summary["achieved_bps"] == pytest.approx(sum(SIZES) * 8 / last_s)
    late = [row["lateness_ns"] / 1e3 for row in sent]
    assert summary["lateness_max_us"] == pytest.approx(max(late))
    assert summary["lateness_p50_us"] == pytest.approx(nearest_rank(late, 0.5), rel=0.01)
    assert summary["lateness_p99_us"] == pytest.approx(nearest_rank(late, 0.99), rel=0.01)
    assert summary["missed_slots"] == sum(value > 1000 for value in late)


def test_the_load_in_bins_follows_from_the_log(run: Run) -> None:
    summary, log, _ = run
    origin_ns = open_records(log).about["origin_ns"]
    offered = [0] * 4
    for row in by_flow(log):
        offered[(row["intended_start_ns"] - origin_ns) // (100 * MS)] += row["size_bytes"]
    bins = summary["load_100ms"]
    assert bins["offered_bps"] == pytest.approx([size * 80 for size in offered])
    # what the kernel took: all of the flows that were complete at a bin's end, and nothing of those that began later
    for end in range(1, 5):
        end_ns, taken = origin_ns + end * 100 * MS, sum(bins["sent_bps"][:end]) / 80
        complete = sum(row["size_bytes"] for row in by_flow(log) if row["finish_ns"] <= end_ns)
        begun = sum(row["size_bytes"] for row in by_flow(log) if row["start_ns"] < end_ns)
        assert complete * 0.99 <= taken <= begun
    assert bins["sent_bps"][0] > 0


def test_completion_times_follow_from_the_log(run: Run) -> None:
    summary, log, _ = run
    every = [completion_s(row) for row in by_flow(log)]
    assert summary["fct_mean_s"] == pytest.approx(sum(every) / len(every), rel=1e-6)
    assert summary["fct_p50_s"] == pytest.approx(nearest_rank(every, 0.5), rel=0.01)
    assert summary["fct_p99_s"] == pytest.approx(nearest_rank(every, 0.99), rel=0.01)


@pytest.mark.parametrize(
    ("place", "low", "high", "count"), [(0, 0, 100_000, 150), (1, 100_000, 10**7, 40), (2, 10**7, None, 2)]
)
def test_size_classes_follow_from_the_log(run: Run, place: int, low: int, high: int | None, count: int) -> None:
    summary, log, _ = run
    row = summary["fct_by_size"][place]
    mine = [one for one in by_flow(log) if low <= one["size_bytes"] < (high or 2**62)]
    times = [completion_s(one) for one in mine]
    assert (row["from_bytes"], row["to_bytes"], row["flows"]) == (low, high, count)
    assert row["fct_mean_s"] == pytest.approx(sum(times) / count, rel=1e-6)
    assert row["fct_p50_s"] == pytest.approx(nearest_rank(times, 0.5), rel=0.01)
    assert row["fct_p99_s"] == pytest.approx(nearest_rank(times, 0.99), rel=0.01)
    # over the time on the empty link: the smallest round trip, and the bytes at the line rate; kept in thousandths
    slower = [completion_s(one) / (one["min_rtt_us"] / 1e6 + one["size_bytes"] * 8 / LINE_BPS) for one in mine]
    assert row["slowdown_mean"] == pytest.approx(sum(slower) / count, abs=0.001)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        assert row[f"slowdown_{name}"] == pytest.approx(nearest_rank(slower, share), rel=0.01, abs=0.001)


def test_slowdowns_and_achieved_rates_are_those_of_verify(run: Run) -> None:
    summary, log, _ = run
    sent = read_sent([log])
    classes = completion(sent, LINE_BPS, None).to_dict("records")[1:]
    for ours, theirs in zip(summary["fct_by_size"], classes, strict=True):
        assert ours["slowdown_mean"] == pytest.approx(theirs["slowdown_mean"], abs=0.001)
        assert ours["fct_mean_s"] == pytest.approx(theirs["fct_mean_s"])
    whole, _ = load(read_plan(log.parent / "mixed.plan"), sent, from_log(sent), None)
    assert whole["whole"]["achieved_bps"] == pytest.approx(summary["achieved_bps"], rel=1e-4)


def test_without_a_line_rate_there_is_no_slowdown(tmp_path: Path) -> None:
    with serving() as serve:
        summary, _ = send(plan_of(tmp_path / "p.plan", [Flow(0, "", serve.address, 10)], MS))
    assert {row["slowdown_mean"] for row in summary["fct_by_size"]} == {None}
    assert [row["fct_mean_s"] is None for row in summary["fct_by_size"]] == [False, True, True]
    assert summary["congestion_impact"] is None


def test_the_congestion_impact_factor_follows_from_both_logs(run: Run) -> None:
    _, log, second = run
    before, after = ([completion_s(row) for row in by_flow(path)] for path in (log, second["log"]))
    impact = second["congestion_impact"]
    assert impact["mean"] == pytest.approx((sum(after) / len(after)) / (sum(before) / len(before)), rel=1e-6)
    # Either quantile is right to 0.5 %
    assert impact["p99"] == pytest.approx(nearest_rank(after, 0.99) / nearest_rank(before, 0.99), rel=0.011)


def test_endless_flows_are_in_no_baseline(tmp_path: Path) -> None:
    """Their completion times say how long the plan is, and the summary leaves them out as well."""
    with serving() as serve:
        flows = [Flow(0, "", serve.address, 0), *[Flow(at * MS, "", serve.address, 5000) for at in range(50)]]
        plan = plan_of(tmp_path / "p.plan", flows, 300 * MS)
        send(plan, "--log", tmp_path / "s.rec")
        summary, _ = send(plan, "--log", tmp_path / "t.rec", "--baseline", tmp_path / "s.rec")
    logs = [by_flow(tmp_path / name) for name in ("s.rec", "t.rec")]
    assert [[row["flow"] for row in log] for log in logs] == [list(range(51))] * 2, (logs, summary)
    before, after = ([completion_s(row) for row in log[1:]] for log in logs)
    assert summary["congestion_impact"]["mean"] == pytest.approx(sum(after) / sum(before), rel=1e-6), (logs, summary)


def test_what_is_no_baseline_is_refused(tmp_path: Path) -> None:
    with serving("--log", tmp_path / "r.rec") as serve:
        plan = plan_of(tmp_path / "p.plan", [Flow(0, "", serve.address, 10)], MS)
        send(plan, "--log", tmp_path / "s.rec")
        serve.end()
    whole = (tmp_path / "s.rec").read_bytes()
    (tmp_path / "empty.rec").write_bytes(whole[: open_records(tmp_path / "s.rec").offset])
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "part").write_text(json.dumps({"format": "ringtap-records"}) + "\n")
    refused = {
        "r.rec": "is not a log of 'ringtap traffic send'",
        "empty.rec": "no finished flow",
        "text": "not a ringtap record file",
        "part": "not a ringtap record file",
        "missing.rec": "cannot be read",
    }
    for name, words in refused.items():
        done = traffic("send", plan, "--baseline", tmp_path / name, expect=2)
        assert words in done.stderr.splitlines()[-1]
    done = traffic("send", plan, "--baseline", tmp_path, expect=2)
    assert "cannot be read" in done.stderr.splitlines()[-1]
