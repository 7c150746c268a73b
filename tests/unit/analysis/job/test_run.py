import json
import os
import time

import numpy as np
import pandas as pd
import pytest

from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.job.summary_text import describe
from ringtap.analysis.live.follow_run import RunFollower
from ringtap.analysis.plots.figures_on_axes import timeline
from ringtap.analysis.runs.derived_table_cache import read_summary
from ringtap.cli import main
from ringtap.core.append_only_logs import open_records
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.core.units import format_change
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import MS, START_NS, Node, Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "job"
    truth = write_ddp_job(path, Truth())
    return open_job(path), truth


def test_iterations_are_on_the_reference_clock(job):
    found, truth = job
    table = found.iterations
    assert len(table) == truth.iterations
    assert table["iteration_s"].to_numpy() == pytest.approx(truth.iteration_ms / 1000, abs=1e-9)
    assert table["end_ns"].iloc[0] == START_NS + (50 + truth.iteration_ms) * MS
    assert table["warm_up"].tolist() == [True, True] + [False] * (truth.iterations - 2)


def test_phases_are_those_of_the_job(job):
    found, truth = job
    row = found.iterations.iloc[5]
    assert row["compute_s"] == pytest.approx(0.130)
    # rank 0 was ready 30 ms earlier and waited for rank 1
    assert row["exposed_least_s"] == pytest.approx(truth.network_ms / 1000)
    assert row["exposed_s"] == pytest.approx((0.020 + 0.050) / 2)
    assert row["overlap_s"] == pytest.approx(0.020)
    ranks = found.rank_iterations
    assert ranks[ranks["rank"] == 0]["communication_s"].to_numpy(float) == pytest.approx(0.070)
    assert ranks["optimizer_s"].to_numpy(float) == pytest.approx(0.050)


def test_phases_on_gpus_are_the_devices_durations(tmp_path):
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=6, is_on_gpu=True), sockets=False)
    found = open_job(tmp_path / "job")
    row = found.iterations.iloc[5]
    assert (row["compute_s"], row["overlap_s"]) == (pytest.approx(0.130), pytest.approx(0.020))
    assert row["exposed_least_s"] == pytest.approx(truth.network_ms / 1000)
    assert row["exposed_s"] == pytest.approx((0.020 + 0.050) / 2)
    assert found.rank_iterations["ready_ns"].isna().all()  # no time of the host's says when the last gradient was ready
    assert "its last gradient was ready last" not in found.report()
    with pytest.raises(UsageError, match=r"not known: no rank logged when its last gradient was ready \(DDP on GPUs"):
        timeline(found, 5)


def test_bytes_of_each_class_are_those_of_the_job(job):
    found, truth = job
    table = found.iterations
    assert table["training_bytes"].to_numpy(float) == pytest.approx(2 * truth.rank_bytes, rel=1e-3)
    assert table["cross_bytes"].to_numpy(float) == pytest.approx(truth.cross_bytes, rel=1e-3)
    assert (table["other_bytes"] == 0).all()  # what a socket had sent before the log began is history
    assert table["packet_training_bytes"].isna().all()
    assert table["retransmissions"].sum() == pytest.approx(truth.iterations * truth.rank_bytes // 1_000_000)


def test_flows_know_both_ends(job):
    found, truth = job
    table = found.flows
    ring = table[table["why"] == "rank to rank"]
    assert sorted(zip(ring["source_rank"], ring["destination_rank"], strict=True)) == [(0, 1), (0, 1), (1, 0), (1, 0)]
    busy = ring[ring["payload_bytes"] > 0]
    assert busy["bytes_per_iteration"].to_numpy(float) == pytest.approx(truth.rank_bytes, rel=1e-3)
    assert not table["local"].any()
    cross = table[table["traffic_class"] == "cross"].iloc[0]
    assert (cross["source_node"], cross["destination_node"], cross["why"]) == (
        "n0",
        "n1",
        "port of a traffic generator",
    )


def test_the_slowest_rank_is_found_and_explained(job):
    data = summarize(job[0])["slowest"]
    assert (data["rank"], data["iterations"], data["of"], data["stands_out"]) == (1, 18, 18, True)
    assert data["by_s"] == pytest.approx(0.030, abs=1e-6)
    assert [item["measure"] for item in data["differences"]] == ["compute_s"]
    text = "\n".join(describe(summarize(job[0])))
    assert "Rank 1 (node n1) is the slowest: its last gradient was ready last in 18 of 18 iterations, by 30 ms" in text
    assert "compute (forward and backward pass) 130 ms, the others 100 ms" in text


def test_demand_is_held_against_equation_3_1(job):
    data = summarize(job[0])["demand"]
    assert data["expected_bytes"] == 4_000_000
    assert data["difference"] == pytest.approx(0, abs=1e-3)


def test_sides_agree_and_name_the_overhead(job):
    byte_accounts = {(account["node"], account["direction"]): account for account in summarize(job[0])["byte_accounts"]}
    assert set(byte_accounts) == {("n0", "tx"), ("n0", "rx"), ("n1", "tx"), ("n1", "rx")}
    assert all(abs(account["nic_difference"]) < 1e-3 for account in byte_accounts.values())
    assert byte_accounts["n0", "tx"]["overhead_share"] == pytest.approx(66 / 1448, rel=0.01)


@pytest.mark.parametrize("error_ns", [40_000_000, None])
def test_clocks_that_are_worse_than_the_effect_are_said(tmp_path, error_ns):
    truth = Truth(iterations=12, offsets_ns=(0, 0))
    write_ddp_job(tmp_path / "job", truth)
    if error_ns is None:
        (tmp_path / "job/nodes/n1/clock/clock.json").unlink()
    else:
        fit = {"t0_ns": START_NS, "offset_ns": 0, "drift_ppm": 0, "error_ns": error_ns}
        write_json(tmp_path / "job/nodes/n1/clock/clock.json", {"reference": "n0", "fit": fit})
    data = summarize(open_job(tmp_path / "job"))
    said = " ".join(data["warnings"])
    if error_ns is None:
        assert "clock offsets of n1 were not measured" in said
    else:
        assert "the clocks' error" in said
        assert not data["slowest"]["certain"]
        assert "Not certain: rank 1" in "\n".join(describe(data))


def step_at(mono_ms, step_ns, seen_ms=0):
    """A step as clock.json has it, of a clock that showed START_NS at 0; seen so much later."""
    mono_ns = (mono_ms + seen_ms) * MS
    before_ns = (mono_ms - 1000 + seen_ms) * MS
    return {"t_ns": START_NS + mono_ns + step_ns, "mono_ns": mono_ns, "mono_before_ns": before_ns, "step_ns": step_ns}


def test_drift_and_steps_of_a_clock_are_taken_out(tmp_path):
    truth = Truth(iterations=10, offsets_ns=(0, 0))
    write_ddp_job(tmp_path / "job", truth, sockets=False)
    path = tmp_path / "job/nodes/n1/clock/clock.json"
    common = {"error_ns": 5, "drift_ppm": 0.0}
    begin = {"from_ns": START_NS, "from_mono_ns": 0, "to_ns": START_NS + 900 * MS, "to_mono_ns": 900 * MS}
    end = {"from_ns": START_NS + 1007 * MS, "from_mono_ns": 1000 * MS, "to_mono_ns": 2000 * MS, "error_ns": 9}
    segments = [
        common | begin | {"t0_ns": START_NS, "offset_ns": 0, "drift_ppm": 100.0},
        common | end | {"t0_ns": START_NS + 1007 * MS, "offset_ns": 7_100_000},
    ]
    write_json(path, {"reference": "n0", "fit": segments[0], "segments": segments, "steps": [step_at(1000, 7 * MS)]})
    clock = open_job(tmp_path / "job").logs.nodes["n1"].clock
    mono_ns = np.array([0, 500, 990, 1500], np.int64) * MS
    times = START_NS + mono_ns + np.array([0, 0, 0, 7 * MS])
    found = clock.on_reference(times, mono_ns)
    assert (times - found).tolist() == [0, 50_000, 99_000, 7_100_000]
    assert clock.from_reference(found).tolist() == clock.unstepped(times, mono_ns).tolist()
    assert (clock.error_ns, len(clock.steps)) == (9, 1)


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """A run whose clocks were not set, and its truth."""
    path = tmp_path_factory.mktemp("even") / "even"
    truth = write_ddp_job(path, Truth(iteration_ms=170))
    return open_job(path), truth


@pytest.mark.parametrize("step_ns", [10**9, -(10**9), 3600 * 10**9, -3600 * 10**9])
@pytest.mark.parametrize("who", ["n0", "n1"])
def test_setting_a_clock_of_two_changes_no_iteration(tmp_path, even, who, step_ns):
    """n0 is the reference; one of the clocks is set in the middle of the run, and seen up to a second later."""
    even, truth = even
    write_ddp_job(tmp_path / "set", truth)
    at_ms = 2130  # within an iteration, and its communication
    set_clock(tmp_path / "set", who, at_ms, step_ns, truth)
    found = open_job(tmp_path / "set")
    exact = ["step", "start_ns", "end_ns", "iteration_s", "slowest_rank", "warm_up"]
    pd.testing.assert_frame_equal(found.iterations[exact], even.iterations[exact])
    moved = ["training_bytes", "cross_bytes", "nic_tx_bytes"]
    pd.testing.assert_frame_equal(found.iterations[moved], even.iterations[moved], atol=1.0)
    lost = found.rank_iterations["compute_s"].isna()
    assert set(found.rank_iterations.loc[lost, "node"]) == {who}
    assert lost.sum() <= 2  # DDP's times are of that clock alone: those of the iteration in which it was set are void
    phases = ["compute_s", "communication_s", "exposed_s", "overlap_s"]
    kept = found.rank_iterations.loc[~lost, phases]
    pd.testing.assert_frame_equal(kept, even.rank_iterations.loc[~lost, phases])
    data = summarize(found)
    assert any(
        f"the clock of {who} was set during the run ({format_change(step_ns / 1e9)})" in one for one in data["warnings"]
    )
    assert data["iterations"]["max_s"] == pytest.approx(truth.iteration_ms / 1000)


def set_clock(run, who, at_ms, step_ns, truth):
    """Rewrite the logs of a node as they were, had its clock been set."""
    offset_ns = truth.offsets_ns[int(who[1:])]
    steps = run / "nodes" / who
    for path in [*steps.glob("*/*.rec")]:
        file = open_records(path)
        names = [field.name for field in file.fields]
        records = np.fromfile(path, np.dtype([(one.name, one.type) for one in file.fields]), offset=file.offset)
        at_ns = START_NS + offset_ns + at_ms * MS
        for name in names:
            if name in ("t_ns", "start_ns", "end_ns") or name.endswith(("_start_ns", "_end_ns")):
                records[name] += np.where(records[name] >= at_ns, step_ns, 0)
        with path.open("r+b") as stream:
            stream.seek(file.offset)
            stream.write(records.tobytes())
    seen = step_at(at_ms + offset_ns // MS, step_ns, seen_ms=400)
    path = run / "nodes" / who / "clock" / "clock.json"
    item = json.loads(path.read_text())
    other = run / "nodes" / "n1" / "clock" / "clock.json"
    line = json.loads(other.read_text())
    begin = {"from_ns": line["fit"]["t0_ns"], "from_mono_ns": 0, "to_mono_ns": seen["mono_before_ns"]}
    end = {"from_mono_ns": seen["mono_ns"], "to_mono_ns": 60_000 * MS}
    shift = step_ns if who == "n1" else 0
    end["from_ns"] = end["t0_ns"] = START_NS + seen["mono_ns"] + shift
    after = line["fit"]["offset_ns"] + (step_ns if who == "n1" else -step_ns)
    segments = [line["fit"] | begin, line["fit"] | end | {"offset_ns": after}]
    write_json(other, line | {"segments": segments})
    item = json.loads(path.read_text())
    write_json(path, item | {"steps": [seen]})


def test_accumulation_and_skipped_steps_are_flagged(tmp_path):
    run = RunDirectory.create(tmp_path / "job", "job", [], 1)
    node = Node(run, "n0")
    step = 100 * MS
    # two optimizers, four backward passes per iteration, the third step of the first one skipped
    records = []
    for number in range(6):
        end = START_NS + (number + 1) * step
        kind = 1 if number == 3 else 0
        records.append((number, 0, end - 5, end, 0, 0, kind, 3))
        records.append((number, 1, end + 10, end + 20, 0, 0, 0, 1))
    node.steps(0, records)
    node.finish()
    table = open_job(run.path).iterations
    assert len(table) == 5
    assert table["backwards"].tolist() == [4] * 5
    assert table["skipped"].tolist() == [False, False, True, False, False]
    assert table["compute_s"].isna().all()


def test_marks_of_the_program_come_before_steps(tmp_path):
    run = RunDirectory.create(tmp_path / "job", "job", [], 1)
    node = Node(run, "n0")
    records = []
    for number in range(8):
        end = START_NS + number * 100 * MS
        records.append((number, 0, end - 5, end, 0, 0, 0, 1))
        if number % 2:
            records.append((number // 2, -1, end + 7, end + 7, 0, 0, 2, 0))
    node.steps(0, records)
    table = open_job(run.path).iterations
    assert table["iteration_s"].to_numpy() == pytest.approx([0.2] * 3)
    assert table["backwards"].tolist() == [2] * 3


def test_without_times_of_ddp_or_horovod_nothing_is_made_up(tmp_path):
    truth = write_ddp_job(tmp_path / "job", Truth(), sockets=False)
    for path in (tmp_path / "job").glob("nodes/*/steps/*.ddp.rec"):
        path.unlink()
    found = open_job(tmp_path / "job")
    data = summarize(found)
    assert len(found.iterations) == truth.iterations - 1  # nothing marks where the first begins
    assert data["phases"]["source"] == "none"
    assert data["phases"]["compute_s"] is None
    assert "Compute and communication: not measured" in "\n".join(describe(data))
    assert data["bytes"]["classes"]["training"]["sockets"] is None
    json.dumps(data, allow_nan=False)


def test_a_rank_restarted_begins_a_generation_and_gaps_do_not_count(tmp_path):
    run = RunDirectory.create(tmp_path / "job", "job", [], 1)
    node = Node(run, "n0")
    for generation, first_ns in enumerate((START_NS, START_NS + 60_000 * MS)):
        records = [(n, 0, 0, first_ns + n * 100 * MS, 0, 0, 0, 1) for n in range(1, 5)]
        records = [(*record[:2], record[3] - 5, *record[3:]) for record in records]
        node.steps(0, records, pid=10 + generation)
    table = open_job(run.path).iterations
    assert table["generation"].tolist() == [0, 0, 0, 1, 1, 1]
    assert table["iteration_s"].to_numpy() == pytest.approx([0.1] * 6)


def plain_job(path, processes):
    """A node whose processes step alone: ``(rank, pid, first step in ms, ms from step to step, steps)`` each."""
    node = Node(RunDirectory.create(path, "job", [], 1), "n0")
    for rank, pid, first_ms, each_ms, count in processes:
        ends = [START_NS + (first_ms + number * each_ms) * MS for number in range(count)]
        node.steps(rank, [(n, 0, end - MS, end, 0, 0, 0, 1) for n, end in enumerate(ends)], pid, 1)
    node.finish()
    return open_job(path)


def test_a_process_that_lived_beside_another_was_not_started_again(tmp_path):
    """One imports for longer and steps when the other has ended; a third began after both. Nothing joins them."""
    run = RunDirectory.create(tmp_path / "job", "job", [], 1)
    node = Node(run, "n0")
    for pid, first_ms, age_ms in ((50, 0, 3000), (51, 2000, 5000), (52, 5000, 2000)):
        ends = [START_NS + (first_ms + number * 10) * MS for number in range(60)]
        records = [(n, 0, end - MS, end, 0, 0, 0, 1) for n, end in enumerate(ends)]
        node.steps(0, records, pid, 1, age_ms * MS)
    node.finish()
    found = open_job(tmp_path / "job")
    assert found.iterations["generation"].value_counts().to_dict() == {0: 59}
    assert [(one["pid"], one["shown"]) for one in summarize(found)["training_phases"]] == [
        (50, False),
        (51, False),
        (52, True),
    ]
    live = RunFollower(tmp_path / "job")
    live.poll()
    assert {steps.pid: steps.generation for steps in live.ranks} == {50: 0, 51: 0, 52: 1}


def test_processes_at_the_same_time_are_no_rank_that_was_started_again(tmp_path):
    found = plain_job(tmp_path / "job", [(0, 50, 0, 10, 60), (0, 51, 5, 20, 40), (0, 52, 5000, 10, 30)])
    data = summarize(found)
    assert data["iterations"]["restarts"] == 0  # nothing says whether pid 52 goes on with the work of 50 or of 51
    rows = [(one["pid"], one["steps"], one["shown"], one["is_concurrent"]) for one in data["training_phases"]]
    assert rows == [(50, 60, False, True), (51, 40, True, True), (52, 30, False, False)]
    assert found.iterations["iteration_s"].to_numpy() == pytest.approx([0.02] * 39)
    text = "\n".join(describe(data))
    assert "3 phases; all that follows is of phase 2 (--phase N)." in text
    assert "Other processes, not ranks of its process group, trained at the same time: phase 1." in text
    first = open_job(found.path, phase=1)
    assert first.iterations["iteration_s"].to_numpy() == pytest.approx([0.01] * 59)
    with pytest.raises(UsageError, match="has no training phase 4: its phases are 1 to 3"):
        summarize(open_job(found.path, phase=4))


@pytest.mark.parametrize(("steps", "said"), [(1, "1 step of the optimizer was recorded"), (5, "4 iterations in")])
def test_a_job_of_few_steps_is_told_how_many_there_were(tmp_path, steps, said):
    text = "\n".join(describe(summarize(plain_job(tmp_path / "job", [(0, 50, 0, 10, steps)]))))
    assert said in text
    assert "1 rank on 1 node" in text
    assert "No optimizer step" not in text
    assert ("Nothing marks the beginning of the first step (5 steps in all)." in text) == (steps == 5)


def test_two_optimizers_are_no_accumulation(tmp_path):
    node = Node(RunDirectory.create(tmp_path / "job", "job", [], 1), "n0")
    records = []
    for number in range(20):
        end = START_NS + number * 100 * MS
        records.append((number, 0, end - 5, end, 0, 0, 0, 2))
        records.append((number, 1, end + 10, end + 20, 0, 0, 0, 1))
    node.steps(0, records)
    found = open_job(tmp_path / "job")
    assert found.iterations["optimizers"].tolist() == [2] * 19
    text = "\n".join(describe(summarize(found)))
    assert "An iteration is a round of the optimizers: 1 step of optimizer 0, 1 step of optimizer 1." in text
    assert "3 backward passes per iteration, for 2 optimizers." in text
    assert "accumulated" not in text


def test_what_several_modules_hand_over_is_counted_pass_by_pass(tmp_path):
    """A GAN's discriminator is synchronised by the generator's backward pass too."""
    truth = write_ddp_job(tmp_path / "job", Truth(offsets_ns=(0, 0)))
    for rank, node in enumerate(("n0", "n1")):
        path = tmp_path / "job" / "nodes" / node / "steps" / f"rank{rank}-{100 + rank}.ddp.rec"
        file = open_records(path)
        records = np.fromfile(path, np.dtype([(one.name, one.type) for one in file.fields]), offset=file.offset)
        second = records.copy()
        second["module"] = 1
        again = records.copy()
        again["comm_start_ns"] += 1
        with path.open("r+b") as stream:
            stream.seek(file.offset)
            stream.write(np.stack((records, second, again), axis=1).tobytes())
        lines = path.with_name(path.name.replace(".ddp.rec", ".buckets.jsonl"))
        first = json.loads(lines.read_text())
        with lines.open("a") as stream:
            stream.write(json.dumps(first | {"module": 1, "bucket_bytes": [1_000]}) + "\n")
    data = summarize(open_job(tmp_path / "job"))["demand"]
    assert data["synchronisations"] == 3
    assert data["synchronised_bytes"] == 2 * truth.gradient_bytes + 1_000
    assert data["expected_bytes"] == 2 * truth.gradient_bytes + 1_000


def test_times_that_are_not_known_are_missing(tmp_path):
    found = plain_job(tmp_path / "job", [(0, 50, 0, 10, 4), (0, 51, 5000, 10, 4)]).rank_iterations
    assert found["begin_ns"].notna().all()
    assert ((found["end_ns"] - found["begin_ns"]) == 10 * MS).all()
    assert found["ready_ns"].isna().all()
    truth = write_ddp_job(tmp_path / "ddp", Truth())
    found = open_job(tmp_path / "ddp").rank_iterations
    first = found[found["iteration"] == 0]
    assert first["begin_ns"].tolist() == [START_NS + 50 * MS] * 2  # by DDP's first forward pass
    assert (first["ready_ns"] - first["begin_ns"]).tolist() == [ms * MS for ms in truth.compute_ms]
    for path in (tmp_path / "ddp").glob("nodes/n1/steps/*.ddp.rec"):
        path.unlink()
    found = open_job(tmp_path / "ddp").rank_iterations
    assert found[found["node"] == "n1"]["ready_ns"].isna().all()
    assert found["begin_ns"].min() > START_NS


def test_a_job_too_short_for_bytes_says_so(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=5, every_ms=400))
    data = summarize(open_job(tmp_path / "job"))
    assert data["bytes"]["too_short"]
    assert (data["demand"]["sent_bytes"], data["demand"]["difference"]) == (None, None)
    text = "\n".join(describe(data))
    assert "The job is too short to say what it moves in an iteration: it has 3 iterations of 200 ms" in text
    assert "Payload of the whole recording" in text
    assert "Interfaces" not in text
    assert "Retransmitted in all: 16 segments" in text


def test_a_job_too_short_for_bytes_has_none_by_iteration(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=5, every_ms=400))
    job = open_job(tmp_path / "job")
    data = summarize(job)
    names = ["training_bytes", "cross_bytes", "other_bytes", "retransmissions", "retransmitted_bytes", "nic_tx_bytes"]
    assert job.iterations[[*names, "nic_drops", "segments_retransmitted"]].isna().all(axis=None)
    assert job.rank_iterations[["sent_bytes", "retransmissions"]].isna().all(axis=None)
    assert job.flows["bytes_per_iteration"].isna().all()
    assert job.flows["payload_bytes"].sum() > 0
    assert {account["node"] for account in data["byte_accounts"]} == {"n0", "n1"}
    assert {
        account[name] for account in data["byte_accounts"] for name in ("nic_bytes", "socket_bytes", "nic_difference")
    } == {None}
    congestion = data["congestion"]
    assert (congestion["per"], congestion["retransmissions"], congestion["nic_drops"]) == ("run", 16.0, None)
    assert data["slow_iterations"] is None
    json.dumps(data, allow_nan=False)


def test_too_few_iterations_name_no_slowest_rank(tmp_path):
    write_ddp_job(tmp_path / "few", Truth(iterations=11))
    write_ddp_job(tmp_path / "enough", Truth(iterations=12))
    few, enough = (summarize(open_job(tmp_path / name)) for name in ("few", "enough"))
    assert (few["iterations"]["measured"], enough["iterations"]["measured"]) == (9, 10)
    assert few["slowest"] is None
    assert enough["slowest"]["stands_out"]
    assert "too few to tell it from chance" in "\n".join(describe(few))


def test_a_log_that_ends_early_leaves_missing_bytes_not_zeros(tmp_path):
    truth = write_ddp_job(tmp_path / "job", Truth())
    for name in ("sockets/sockets.rec", "nic/nic.rec"):
        path = tmp_path / "job/nodes/n1" / name
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2 + 1)
    (tmp_path / "job/nodes/n1/DONE").unlink()
    found = open_job(tmp_path / "job")
    table = found.iterations
    known = table["training_bytes"].notna().to_numpy()
    assert 3 < known.sum() < truth.iterations - 3
    assert table["training_bytes"][known].to_numpy(float) == pytest.approx(2 * truth.rank_bytes, rel=1e-3)
    data = summarize(found)
    assert data["run"]["status"] == "partial"
    assert "n1: its agent was ended before" in data["run"]["why"]
    assert any("torn" in warning for warning in data["warnings"])
    assert any(f"cover {data['bytes']['iterations']} of 18 iterations" in warning for warning in data["warnings"])
    json.dumps(data, allow_nan=False)


def test_damaged_and_empty_logs_are_said_and_the_rest_is_read(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=5))
    folder = tmp_path / "job/nodes/n0"
    (folder / "sockets/sockets.rec").write_bytes(b"")
    (folder / "nic/nic.rec").write_bytes(b"no header\n")
    (folder / "clock/clock.json").write_text('{"fit": {"offset_ns": "x"}')
    (folder / "node.json").write_text("{")
    (folder / "sockets/owners.jsonl").write_text('{"inode": 1}\nhello\n{"ino')
    data = summarize(open_job(tmp_path / "job"))
    assert data["iterations"]["count"] == 5
    said = " ".join(data["warnings"])
    assert "n0/nic/nic.rec cannot be used" in said
    assert "n0/node.json cannot be used" in said
    json.dumps(data, allow_nan=False)
    describe(data)


def test_half_of_the_ranks_are_not_called_whole(tmp_path):
    """As on node-local disks, where each node has a run of its own."""
    truth = write_ddp_job(tmp_path / "job", Truth(iterations=12))
    assert "all nodes together" in "\n".join(describe(summarize(open_job(tmp_path / "job"))))
    for path in (tmp_path / "job").glob("nodes/*/steps/rank?-???.rec"):
        header, records = path.read_bytes().split(b"\n", 1)
        item = json.loads(header)
        item["about"] |= {"group": "torch", "world_size": len(truth.compute_ms) + 2}
        path.write_bytes(json.dumps(item).encode() + b"\n" + records)
    data = summarize(open_job(tmp_path / "job"))
    count = len(truth.compute_ms)
    why = f"{count} of {count + 2} ranks recorded steps here, ranks {count}, {count + 1} did not"
    assert (data["run"]["status"], data["run"]["why"], data["run"]["missing_ranks"]) == ("partial", why, why)
    text = "\n".join(describe(data))
    assert f"; partial: {why}" in text
    assert "Payload per iteration, to and from the ranks recorded here" in text
    assert "all nodes together" not in text


def test_a_run_whose_writers_were_all_killed_does_not_run_for_ever(tmp_path):
    """As by a memory limit, which ends supervisors and agents: run.json stays at running."""
    path = tmp_path / "job"
    write_ddp_job(path, Truth(iterations=6), status="running")
    (path / "nodes" / "n1" / "DONE").unlink()
    assert main(["analyze", str(path)]) == 0
    assert summarize(open_job(path))["run"]["status"] == "running"
    for written in path.glob("nodes/**/*"):
        os.utime(written, (0, time.time() - 65))
    data = read_summary(open_job(path).logs, path / "derived")  # from before
    why = "nothing was left to write how the job ended; n1: its agent was ended before it had written everything"
    assert (data["run"]["status"], data["run"]["why"]) == ("partial", why)
    assert summarize(open_job(path))["run"]["why"] == why


def test_a_rank_that_failed_is_the_runs_end(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=6))
    path = tmp_path / "job" / "nodes" / "n1" / "node.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"jobs": [{"rank": 1, "exit_code": 7}]}))
    run = summarize(open_job(tmp_path / "job"))["run"]
    assert (run["status"], run["why"]) == ("failed", "rank 1 on n1 ended with exit code 7")
    (path.parent / "DONE").unlink()
    run = summarize(open_job(tmp_path / "job"))["run"]
    cut = "n1: its agent was ended before it had written everything"
    assert (run["status"], run["why"]) == ("failed", f"rank 1 on n1 ended with exit code 7; {cut}")


def test_a_run_without_steps_is_one_recording(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=10))
    for path in (tmp_path / "job").glob("nodes/*/steps/*"):
        path.unlink()
    found = open_job(tmp_path / "job")
    data = summarize(found)
    assert data["iterations"]["count"] == 0
    assert data["bytes"]["per"] == "run"
    assert data["bytes"]["classes"]["training"]["sockets"] == pytest.approx(10 * 8_000_000, rel=1e-3)
    assert "of the whole recording" in "\n".join(describe(data))
    assert len(found.byte_accounts) == 4
    json.dumps(data, allow_nan=False)


def test_an_empty_run_is_described_too(tmp_path):
    run = RunDirectory.create(tmp_path / "job", "job", ["ringtap", "run"], 1)
    data = summarize(open_job(run.path))
    assert data["run"]["status"] == "running"
    assert data["run"]["why"].endswith("how it ended, or its disk was full")
    assert describe(data)
    json.dumps(data, allow_nan=False)
    run.node("n0")
    assert "nothing" not in "\n".join(describe(summarize(open_job(run.path))))


def test_what_was_not_collected_has_its_reason(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=5))
    path = tmp_path / "job/nodes/n0/node.json"
    item = json.loads(path.read_text())
    item["collectors"] = {
        "nic": {"state": "ok", "reason": "", "missed_samples": 3},
        "gpu": {"state": "unavailable", "reason": "no NVML.", "remedy": "load a driver"},
    }
    write_json(path, item)
    found = open_job(tmp_path / "job")
    states = found.collectors.set_index(["node", "collector"])
    assert states.loc[("n0", "gpu"), "state"] == "unavailable"
    assert states.loc[("n1", "gpu"), "reason"] == "not asked for"
    assert states.loc[("n0", "nic"), "missed_samples"] == 3
    data = summarize(found)
    text = "\n".join(describe(data))
    assert "gpu on n0: no NVML (load a driver)" in text
    assert "samples were missed (n0 nic 3)" in text


def test_a_series_of_a_sweep_is_read_and_a_sweep_is_refused(tmp_path):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")])
    with pytest.raises(UsageError, match=r"ringtap report \(open_sweep\) reads it, or name one of its series"):
        open_job(tmp_path / "sweep")
    series = tmp_path / "sweep/series/vgg16-consistent-1"
    ended = {"rank": 1, "exit_code": 143, "signal": "SIGTERM", "ended_ns": 1}
    (series / "nodes/S0/node.json").write_text(json.dumps({"schema": 1, "status": "complete", "jobs": [ended]}))
    info = json.loads((series / "run.json").read_text()) | {"series": "vgg16-consistent"}
    (series / "run.json").write_text(json.dumps(info))
    found = open_job(series)
    data = summarize(found)
    assert "SIGTERM" not in data["run"]["why"], "the sweep has ended it"
    assert data["iterations"]["count"] > 100
    assert data["bytes"]["classes"]["training"]["sockets"] is None
    assert {account["node"] for account in data["byte_accounts"]} == {"S0", "switch"}
    text = " ".join(describe(data))
    assert "sockets" in text
    assert "cannot be told: the iterations are of different loads." in text
    assert found.diagnosis.empty


def test_slow_iterations_are_compared_with_usual_ones(tmp_path):
    run = RunDirectory.create(tmp_path / "job", "job", [], 1)
    node = Node(run, "n0")
    lengths = [300 if number % 20 == 10 else 100 for number in range(100)]
    ends = START_NS + np.cumsum([50, *lengths]) * MS
    node.steps(0, [(n, 0, int(end) - 5, int(end), 0, 0, 0, 1) for n, end in enumerate(ends)])
    counted, rows = 0, []
    for length, end in zip([50, *lengths], ends.tolist(), strict=True):
        rows.append((end - length * MS, counted))
        counted += 40 if length == 300 else 0
    rows.append((int(ends[-1]), counted))
    node.wide("ethtool/eth0.rec", {"rx_prio3_pause": "counter", "rx_prio3_pause_duration": "counter"},
              [(*row, row[1] * 1000) for row in rows])  # fmt: skip
    data = summarize(open_job(run.path))["slow_iterations"]
    assert data["iterations"] == 5
    assert data["mean_s"] == pytest.approx(0.3)
    assert data["differences"] == [
        {"measure": "pause_frames", "what": "pause frames", "unit": "", "here": 40.0, "others": 0.0}
    ]


def test_columns_have_types_that_can_be_missing(job):
    found, _ = job
    kinds = found.iterations.dtypes
    assert kinds["training_bytes"] == pd.Float64Dtype()
    assert kinds["slowest_rank"] == pd.Int64Dtype()
    assert found.flows.dtypes["source_rank"] == pd.Int64Dtype()


@pytest.mark.parametrize("kept", [True, False])
def test_a_disk_that_may_have_been_full_is_named_where_a_node_has_not_ended(tmp_path, kept):
    write_ddp_job(tmp_path / "job", Truth(iterations=12))
    info = json.loads((tmp_path / "job/run.json").read_text())
    write_json(tmp_path / "job/run.json", info | {"status": "running"})
    if not kept:
        (tmp_path / "job/nodes/n1/DONE").unlink()
    why = summarize(open_job(tmp_path / "job"))["run"]["why"]
    assert why.endswith("how it ended" if kept else "how it ended, or its disk was full")


def test_parts_of_an_iteration_add_up_although_ranks_end_at_different_times(tmp_path):
    path = tmp_path / "job"
    write_ddp_job(path, Truth())
    found = open_job(path)
    table = found.rank_iterations.copy()
    early_and_late = np.where(table["iteration"] % 2 == 0, 1.0, -1.0)
    table["exposed_s"] += early_and_late * (table["exposed_s"].mean() + 1.0)  # the rest of every other one is below 0
    found.__dict__["rank_iterations"] = table
    parts = found.ranks[["compute_s", "exposed_s", "optimizer_s", "unattributed_s"]].astype(float).sum(axis=1)
    mean_s = found.logs.work.iterations["iteration_s"].iloc[found.logs.measured].mean()
    assert parts.to_numpy() == pytest.approx(mean_s, rel=0.05)  # an odd number of iterations leaves one over
