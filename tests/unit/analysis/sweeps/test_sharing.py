"""Jobs that share links, read from a run directory whose every number is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.analysis.report.sharing_page import collect
from ringtap.analysis.runs.run import SweepRun, read_run
from ringtap.analysis.sweeps.sharing import FLUID, MEASURED, jain, sharing_points, slide_of
from ringtap.cli import main
from ringtap.core.append_only_logs import RecordWriter
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import open_log, write_json
from ringtap.workload.demand_of_recorded_job import recorded_job
from tests.gold.shared_jobs import CAPACITY_BPS, MS, RATE_BPS, START_NS, sharing

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


def read(path: Path) -> SweepRun:
    run = read_run(path)
    assert isinstance(run, SweepRun)
    return run


def test_slowdowns_phases_and_overlaps_are_those_of_the_jobs(tmp_path: Path) -> None:
    alone, _, free, kept = sharing_points(read(sharing(tmp_path / "run")))
    assert alone.label == "a alone"
    assert alone.jobs[0].mean_s == pytest.approx(0.1)
    assert alone.fairness is None
    # half of each iteration at 200 of 250 Mbit/s; the counters are sampled every 10 ms
    assert alone.utilisation == pytest.approx(0.4, rel=0.02)
    a, b = free.jobs
    assert (a.mean_s, b.mean_s) == (pytest.approx(0.15), pytest.approx(0.155))
    assert b.slowdown == pytest.approx(1.55)
    assert a.rate_bps == pytest.approx(0.4 * CAPACITY_BPS * 0.1 / 0.15, rel=0.02)
    assert free.fairness == pytest.approx(jain([1 / 1.5, 1 / 1.55]))
    phases = free.phases[free.phases["job"] == "b"]["phase"]
    assert phases.dropna().diff().median() == pytest.approx(5 / 150)
    assert b.phase_kept is not None
    assert b.phase_kept < 0.5, "b slides all the way round"
    a, b = kept.jobs
    assert (a.pause_s, a.predicted_s) == (pytest.approx(0.005), 0.1)
    assert (b.phase, b.phase_kept) == (pytest.approx(0.5), pytest.approx(1.0))
    # b is 50 ms later and both communicate from 40 to 90 ms: never at once
    assert b.overlap == pytest.approx(0.0, abs=0.01)
    assert free.jobs[0].overlap is not None
    assert 0.2 < free.jobs[0].overlap < 0.8, "a half on average while b slides"


def test_a_link_whose_mtu_is_not_recorded_has_no_rate(tmp_path: Path) -> None:
    path = sharing(tmp_path / "run")
    info = json.loads((path / "run.json").read_text())
    info["plan"]["topology"]["mtu"] = None
    write_json(path / "run.json", info)
    point = sharing_points(read(path))[0]
    assert (point.utilisation, point.busiest_bps) == (None, None)
    assert "the MTU of to-S0 of node switch was not recorded" in point.utilisation_why


def test_clocks_that_differ_from_the_reference_change_no_point(tmp_path: Path) -> None:
    """Windows are by the hosts' clocks, phases and communication by the reference's."""
    path = sharing(tmp_path / "run")
    expected = sharing_points(read(path))
    fit = {"t0_ns": 0, "offset_ns": 70 * MS, "drift_ppm": 0.0, "error_ns": 1000}
    for node in path.glob("series/*/nodes/*"):
        (node / "clock").mkdir()
        write_json(node / "clock" / "clock.json", {"reference": "other", "fit": fit})
    found = sharing_points(read(path))
    assert [point.jobs for point in found] == [point.jobs for point in expected]
    assert [point.links for point in found] == [point.links for point in expected]
    assert [point.utilisation for point in found] == [point.utilisation for point in expected]
    assert [one.phases.equals(other.phases) for one, other in zip(found, expected, strict=True)] == [True] * 4


@pytest.mark.parametrize("step_ns", [50 * MS, -3600 * 10**9])
def test_a_clock_that_is_set_moves_no_communication(tmp_path: Path, step_ns: int) -> None:
    """That of rank 0 of b, which is kept half an iteration behind a."""
    path = sharing(tmp_path / "run")
    expected = sharing_points(read(path))[3]
    after_ns = START_NS + 2000 * MS
    for log in (path / "series" / "cassini-b-1" / "nodes" / "S0").glob("*/*.rec"):
        file = open_log(log)
        data = bytearray(log.read_bytes())
        kinds = [(field.name, field.type) for field in file.fields]
        records = np.frombuffer(data, np.dtype(kinds), offset=file.offset)
        for name in records.dtype.names or ():
            if name in ("t_ns", "start_ns", "end_ns") or name.endswith(("_start_ns", "_end_ns")):
                records[name] += np.where(records[name] >= after_ns, step_ns, 0)
        log.write_bytes(data)
    found = sharing_points(read(path))[3]
    assert [job.overlap for job in found.jobs] == pytest.approx([job.overlap for job in expected.jobs], abs=0.01)
    assert [job.phase for job in found.jobs] == [job.phase for job in expected.jobs]


def test_the_report_says_what_is_best_and_what_was_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharing(tmp_path / "run")
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a and b share a link best at cassini: 1.00 times their iteration times alone, 1.5")
    assert "cassini, score 1.000: 0.100 s per iteration predicted, 0.100 s measured (+0.0%)." in out
    data = json.loads((path / "report" / "report.json").read_text())
    assert [point["label"] for point in data["points"]] == ["a alone", "b alone", "free", "cassini"]
    assert {each.name for each in (path / "report" / "figures").glob("*.csv")} == {
        f"sharing-{name}.csv" for name in ("times", "phases", "by-phase", "slides")
    }
    page = (path / "report" / "report.html").read_text()
    assert "phases that slide" in page
    assert main(["report", str(path), str(path)]) == 2
    assert "stands alone" in capsys.readouterr().err


def test_links_and_computation_are_in_the_report_if_they_are_known(tmp_path: Path) -> None:
    path = sharing(tmp_path / "run")
    info = json.loads((path / "run.json").read_text())
    for job, flop in zip(info["plan"]["jobs"], (3e12, 1e12), strict=True):
        job["flop"] = flop
    (path / "run.json").write_text(json.dumps(info))
    lines = [json.loads(line) for line in (path / "shared.jsonl").read_text().splitlines()]
    for line in lines:
        # the link is twice as fast as the plan's capacity
        about = {"link": "leaf0 to spine1", "rate_bps": 2 * CAPACITY_BPS, "jobs": [job["name"] for job in line["jobs"]]}
        line["ports"] = [port | about for port in line["ports"]]
        line["jobs"] = [job | {"path": 1} for job in line["jobs"]]
    (path / "shared.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone, _, free, kept = sharing_points(read(path))
    assert (alone.utilisation, alone.links[0].utilisation) == pytest.approx((0.2, 0.2), rel=0.02)
    assert free.jobs[0].rate_bps == pytest.approx(0.5 * RATE_BPS * 0.1 / 0.15, rel=0.02)
    # 12.5 MB/s of 500 Mbit/s for 100 ms
    assert free.jobs[0].gpu_intensity_flop_per_s == pytest.approx(3e12 / (0.2 * 0.1), rel=0.02)
    assert free.computation is not None
    assert kept.computation is not None
    assert free.computation.flop_per_s == pytest.approx(3e12 / 0.15 + 1e12 / 0.155, rel=1e-3)
    assert free.computation.predicted_flop_per_s == pytest.approx(4e12 / 0.15)
    assert kept.computation.flop_per_s == pytest.approx(4e13, rel=1e-3)
    assert kept.computation.gain == pytest.approx(4e13 / (3e12 / 0.15 + 1e12 / 0.155) - 1, rel=1e-2)
    assert kept.computation.predicted_gain == pytest.approx(0.5)
    data = collect(read(path), [alone, free, kept])
    assert any(line.startswith("cassini: all jobs compute 4e+13 FLOP/s, +5") for line in data["headline"])
    assert data["links"][0][:3] == ["free", "leaf0 to spine1", "a, b"]
    assert [row[:3] for row in data["computations"]] == [
        ["a alone", "equal", "a 1"],
        *([name, "equal", "a 1, b 1"] for name in ("free", "cassini")),
    ]


def test_slides_are_measured_and_predicted_from_the_begin_of_the_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharing(tmp_path / "run")
    measured, predicted = sharing_points(read(path))[2].slides
    assert (measured.job, measured.source, predicted.source) == ("b", MEASURED, FLUID)
    assert measured.phases[:3] == pytest.approx([0, 5 / 150, 10 / 150])
    assert measured.settled_after is None, "b goes on to slide"
    assert predicted.phases == pytest.approx([1 / 3] * len(predicted.phases))
    assert (predicted.settled_after, predicted.last_phase) == (0, pytest.approx(1 / 3))
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "free: 0.150 s per iteration predicted, 0.15" in out
    assert "free: shares were changed every 15.0 ms, which took 5.0% of a CPU." in out
    assert '<h2 id="slides">' in (path / "report" / "report.html").read_text()


@given(st.integers(0, 30), st.floats(0, 1, exclude_max=True), st.floats(0.1, 0.45))
def test_a_phase_that_moves_and_then_stays_is_settled_when_it_stays(moves: int, end: float, away: float) -> None:
    phases = np.full(100, end)
    phases[:moves] = (end + away) % 1
    slide = slide_of("b", MEASURED, phases)
    assert slide is not None
    assert slide.settled_after == moves
    assert abs((slide.last_phase - end + 0.5) % 1 - 0.5) < 1e-9


def test_without_ddps_times_the_overlap_is_absent_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharing(tmp_path / "run", has_ddp=False)
    assert sharing_points(read(path))[2].jobs[0].overlap is None
    assert main(["report", str(path)]) == 0
    assert "a: overlap: DDP's times of its communication were not recorded" in capsys.readouterr().out


def test_jobs_that_did_not_run_at_the_same_time_are_refused(tmp_path: Path) -> None:
    path = sharing(tmp_path / "run", late_ns=60_000 * MS)
    with pytest.raises(UsageError, match="b has 0 iterations in the window of cassini: the jobs did not run at"):
        sharing_points(read(path))


def test_a_damaged_line_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sharing(tmp_path / "run")
    lines = (path / "shared.jsonl").read_text().splitlines()
    (path / "shared.jsonl").write_text("\n".join([lines[0].replace('"alone"', "7"), *lines[1:]]))
    assert main(["report", str(path)]) == 2
    assert "shared.jsonl line 1 cannot be used" in capsys.readouterr().err


def test_a_recorded_job_is_its_period_and_its_rates(tmp_path: Path) -> None:
    path = sharing(tmp_path / "run")
    found = recorded_job(path / "series" / "alone-a-1", "a")
    assert found.period_ns == 100 * MS
    rates = found.rates_bps(10)
    assert rates[5:8] == pytest.approx([RATE_BPS] * 3, rel=0.03)
    assert sum(rates) / 10 == pytest.approx(RATE_BPS / 2, rel=0.03)
    # samples of 10 ms blur an edge by as much
    assert rates[:3] == pytest.approx([0] * 3, abs=0.01 * RATE_BPS)


def test_the_iterations_of_a_job_that_are_not_steps(tmp_path: Path) -> None:
    """A throw-away step, then rounds of two optimizers, with 20 steps of a third once; and a helper of rank 0."""
    run = sharing(tmp_path / "run")
    path = run / "series" / "alone-a-1"
    mean_s = sharing_points(read(run))[0].jobs[0].mean_s
    for log in [one for one in path.glob("nodes/*/steps/*.rec") if one.suffixes == [".rec"]]:
        file = open_log(log)
        place = {field.name: number for number, field in enumerate(file.fields)}
        rows = file.tail()
        log.unlink()
        writer = RecordWriter(log, list(file.fields), dict(file.about))
        times = [field.kind == "time" for field in file.fields]
        for number, row in enumerate(rows):
            steps = [(1, 30 * MS), (2, 0)] if number > 2 else [(0, 0)]
            steps += [(3, -MS * place) for place in range(20)] if number == len(rows) // 2 else []
            for optimizer, earlier_ns in steps:
                values = [value - earlier_ns * is_time for value, is_time in zip(row, times, strict=True)]
                values[place["optimizer"]] = optimizer
                writer.append_many([tuple(values)])
        writer.close()
    helper = path / "nodes" / "S0" / "steps" / "rank0-0.rec"
    writer = RecordWriter(helper, list(file.fields), dict(file.about))
    writer.append_many(rows[:5])
    writer.close()
    assert recorded_job(path, "a").period_ns == 100 * MS
    helper.unlink()
    assert sharing_points(read(run))[0].jobs[0].mean_s == pytest.approx(mean_s)


def test_recorded_runs_are_scheduled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sharing(tmp_path / "run")
    jobs = [str(path / "series" / f"alone-{name}-1") for name in ("a", "b")]
    assert main(["schedule", *jobs, "--capacity", "250mbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # together they have 150 Mbit/s above the link's rate half of the time: 0.6 of its capacity, so 1 - 0.3
    assert found["score_unshifted"] == pytest.approx(0.7, abs=0.02)
    assert found["score"] > 0.95
    assert 30 <= found["shifts_ms"][1] <= 70


def test_a_run_without_counters_or_steps_has_no_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sharing(tmp_path / "run")
    job = path / "series" / "alone-a-1"
    for nic in job.glob("nodes/*/nic/nic.rec"):
        nic.unlink()
    assert main(["schedule", str(job), str(path / "series" / "alone-b-1"), "--capacity", "250mbit"]) == 2
    assert "record the job with the collector nic" in capsys.readouterr().err
    assert main(["schedule", str(path), str(job), "--capacity", "250mbit"]) == 2
    assert "has no steps of rank 0" in capsys.readouterr().err


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_jains_index_is_between_one_job_and_all(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9
    assert jain([values[0]] * len(values)) == pytest.approx(1)
