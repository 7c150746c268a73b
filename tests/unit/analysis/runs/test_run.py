import json

import numpy as np
import pandas as pd
import pytest

import ringtap
from ringtap.analysis.job.run import open_job
from ringtap.analysis.runs.read_binary_records import read_records
from ringtap.analysis.runs.run import JobRun, longest_phase, read_run, window_on_reference
from ringtap.analysis.sweeps.points import measure
from ringtap.analysis.sweeps.sweep import Sweep
from ringtap.core.append_only_logs import RecordWriter, open_records
from ringtap.core.errors import RingtapWarning, UsageError
from ringtap.core.run_directory import RunDirectory
from tests.gold.analysis_sweep import START_NS, STEP_FIELDS, counter_fields, edit_info, write_job, write_sweep
from tests.gold.clocks_apart import retime_windows, set_ahead
from tests.gold.job_run import Node, Socket

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "sweep"
    truth = write_sweep(path, [("vgg16", "consistent"), ("resnet50", "burst")])
    return path, truth


def add_steps(job, name, steps, optimizer=0, node="S0", offset_ns=0):
    writer = RecordWriter(job.node(node) / "steps" / name, STEP_FIELDS, {})
    for step in steps:
        end = START_NS + offset_ns + step * 10**9
        writer.append(step, optimizer, end - 5, end, end - START_NS - 5, end - START_NS)
    writer.close()


def test_iterations_end_with_the_slowest_rank(tmp_path):
    write_job(tmp_path / "job", [0.2, 0.3, 0.4], [(2.0, 0.0, 1e6)])
    run = read_run(tmp_path / "job")
    assert isinstance(run, JobRun)
    assert run.iterations["iteration_s"].to_numpy() == pytest.approx([0.2, 0.3, 0.4])
    assert run.iterations["step"].tolist() == [1, 2, 3]
    assert len(run.steps) == 12
    assert set(run.steps["rank"]) == {0, 1, 2}
    assert run.steps.dtypes["end_ns"] == np.int64
    assert run.torn == {}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["nodes/S0/steps/rank0-10.rec"], "nodes/S0/steps/rank0-10.rec.gz is packed"),
        (["nodes/S1/node.json", "nodes/S1/nic/nic.rec"], "nodes/S1/nic/nic.rec.gz and 1 other log are packed"),
    ],
)
def test_logs_that_somebody_packed_are_not_left_out_in_silence(tmp_path, names, said):
    job = RunDirectory.create(tmp_path / "job", "job", [], 1)
    add_steps(job, "rank0-10.rec", [0, 1, 2])
    add_steps(job, "rank1-11.rec", [0, 1, 2], node="S1")
    capture = job.node("S1") / "packets" / "eth0.pcap.gz"  # which ringtap unpacks
    capture.parent.mkdir()
    capture.write_bytes(b"")
    assert len(read_run(job.path).steps) == 6
    for name in names:
        (job.path / name).parent.mkdir(exist_ok=True)
        (job.path / f"{name}.gz").write_bytes(b"")
    with pytest.raises(UsageError) as refused:
        read_run(job.path)
    assert str(refused.value) == (f"{job.path} cannot be read as a whole: {said}; unpack it, for example with gunzip")


def test_a_sweep_whose_points_are_packed_is_refused(tmp_path):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")])
    points = tmp_path / "sweep" / "points.jsonl"
    points.rename(points.with_name("points.jsonl.gz"))
    with pytest.raises(UsageError, match=r"points\.jsonl\.gz is packed; unpack it"):
        read_run(tmp_path / "sweep")


def test_steps_that_not_every_rank_ended_are_left_out(tmp_path):
    job = RunDirectory.create(tmp_path / "job", "job", [], 1)
    add_steps(job, "rank0-10.rec", [0, 1, 2, 3])
    add_steps(job, "rank1-11.rec", [0, 1, 2], node="S1", offset_ns=1000)
    table = read_run(tmp_path / "job").iterations
    assert table["step"].tolist() == [1, 2]
    assert table["end_ns"].tolist() == [START_NS + 10**9 + 1000, START_NS + 2 * 10**9 + 1000]


def test_a_restarted_rank_begins_a_new_generation(tmp_path):
    job = RunDirectory.create(tmp_path / "job", "job", [], 1)
    add_steps(job, "rank0-10.rec", [0, 1])
    add_steps(job, "rank0-99.rec", [0, 1, 2], offset_ns=10**12)
    table = read_run(tmp_path / "job").iterations
    assert table["generation"].tolist() == [0, 1, 1]
    assert table["iteration_s"].to_numpy() == pytest.approx([1, 1, 1])


def test_of_several_optimizers_the_one_that_steps_first_counts(tmp_path):
    job = RunDirectory.create(tmp_path / "job", "job", [], 1)
    writer = RecordWriter(job.node("S0") / "steps" / "rank0-10.rec", STEP_FIELDS, {})
    for step in range(6):
        end = START_NS + step * 10**9
        if step % 2 == 0:
            writer.append(step // 2, 0, end - 9, end - 8, end - 9 - START_NS, end - 8 - START_NS)
        writer.append(step, 1, end - 5, end, end - 5 - START_NS, end - START_NS)
    writer.close()
    table = read_run(tmp_path / "job").iterations
    assert table["step"].tolist() == [1, 2]
    assert table["iteration_s"].tolist() == [2, 2]


def test_an_iteration_that_began_with_no_step_does_not_choose_the_phase():
    """`ringtap analyze` knows how long it took if DDP logged its beginning; the points of a sweep never do."""
    phases = pd.DataFrame({"ranks": [1, 1], "steps": [4, 11]}, index=pd.Index([1, 2], name="phase"))
    first = pd.DataFrame({"phase": 1, "step": range(4), "iteration_s": [30.0, 1.0, 1.0, 1.0]})
    second = pd.DataFrame({"phase": 2, "step": range(1, 11), "iteration_s": 2.0})
    assert longest_phase(phases, pd.concat([first, second])) == 2
    assert longest_phase(phases, pd.concat([first[1:], second])) == 2
    assert longest_phase(phases, first[:1]) == 2, "the most steps"


def test_a_job_without_steps_has_empty_typed_tables(tmp_path):
    RunDirectory.create(tmp_path / "job", "job", [], 1)
    run = read_run(tmp_path / "job")
    assert list(run.iterations.columns) == ["stretch", "step", "start_ns", "end_ns", "iteration_s", "generation"]
    assert run.iterations.empty
    assert run.steps.empty


def test_torn_records_are_dropped_and_counted(tmp_path):
    write_job(tmp_path / "job", [0.2, 0.3, 0.4], [(2.0, 0.0, 1e6)])
    path = tmp_path / "job" / "nodes" / "S1" / "steps" / "rank1-101.rec"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 3)
    (tmp_path / "job" / "nodes" / "S3" / "steps" / "rank2-777.rec").write_bytes(b"")
    run = read_run(tmp_path / "job")
    assert run.iterations["iteration_s"].to_numpy() == pytest.approx([0.2, 0.3])
    assert run.torn == {"nodes/S1/steps/rank1-101.rec": 1, "nodes/S3/steps/rank2-777.rec": 1}


def test_record_files_that_contradict_themselves_are_refused(tmp_path):
    writer = RecordWriter(tmp_path / "a.rec", STEP_FIELDS, {})
    writer.append(0, 0, 1, 2, 3, 4)
    writer.close()
    table, torn = read_records(tmp_path / "a.rec")
    assert (table["end_ns"].tolist(), torn) == ([2], 0)
    data = (tmp_path / "a.rec").read_bytes()
    (tmp_path / "b.rec").write_bytes(data.replace(b'"record_bytes": 40', b'"record_bytes": 44'))
    with pytest.raises(UsageError, match="44 bytes"):
        read_records(tmp_path / "b.rec")
    (tmp_path / "c.rec").write_bytes(b"hello\n")
    with pytest.raises(UsageError, match="record file"):
        read_records(tmp_path / "c.rec")


def test_points_measure_times_and_traffic_of_the_window(sweep):
    path, truth = sweep
    run = ringtap.open_run(path)
    assert isinstance(run, ringtap.Sweep)
    table = run.points
    assert table["series"].tolist() == [name for name, _, _ in truth]
    assert table["mean_s"].to_numpy(dtype=float) == pytest.approx([mean for _, _, mean in truth], rel=1e-6)
    assert table["cross_gbps"].to_numpy(dtype=float) == pytest.approx([load for _, load, _ in truth], abs=0.15)
    assert table["training_gbps"].to_numpy(dtype=float) == pytest.approx(2.0, abs=0.02)
    assert table["utilisation"].to_numpy(dtype=float) == pytest.approx(
        [(load + 2) / 25 for _, load, _ in truth], abs=0.007
    )
    assert (table["iterations"] == 24).all()
    assert table["requested_gbps"].to_numpy(dtype=float) == pytest.approx([1.05 * load for _, load, _ in truth])
    assert (table["p99_s"] <= table["max_s"]).all()
    assert (table["median_s"] >= table["min_s"]).all()
    assert (table["reasons"] == "").all()


@pytest.mark.parametrize(
    ("bottleneck", "says"),
    [
        ({}, "no counter"),
        (
            {"cross": [{"node": "S9", "nic": "cross0", "direction": "rx"}]},
            "of node S9 was not recorded",
        ),
        ({"cross": [{"node": "S0", "nic": "lost", "direction": "rx"}]}, "lost.rx_bytes"),
    ],
)
def test_missing_counters_give_a_reason_and_never_a_zero(tmp_path, bottleneck, says):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    edit_info(tmp_path / "sweep", bottleneck=bottleneck)
    for point in measure(read_run(tmp_path / "sweep")):
        assert point.unscaled_cross_bps is None
        assert point.unscaled_training_bps is None
        assert any(says in reason for reason in point.reasons)


def test_counters_that_stop_or_run_backwards_give_a_reason(tmp_path):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    path = tmp_path / "sweep" / "series" / "vgg16-consistent-1" / "nodes" / "S0" / "nic" / "nic.rec"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    first, second = measure(read_run(tmp_path / "sweep"))
    assert first.unscaled_cross_bps is not None
    assert second.unscaled_cross_bps is None
    assert "does not cover the window" in second.reasons[0]
    path.unlink()
    writer = RecordWriter(path, counter_fields(["cross0"]), {})
    for tenth in range(200):
        writer.append(START_NS + tenth * 10**8, tenth * 10**8, *[1000 * (tenth % 7)] * 8)
    writer.close()
    assert "was reset" in measure(read_run(tmp_path / "sweep"))[0].reasons[0]
    path.unlink()
    writer = RecordWriter(path, counter_fields(["cross0"]), {})
    for second_ in (0, 1000):
        writer.append(START_NS + second_ * 10**9, second_ * 10**9, *[1000 * second_] * 8)
    writer.close()
    assert "gap at an edge" in measure(read_run(tmp_path / "sweep"))[0].reasons[0]


def write_square_wave(sweep, rates_bps, sample_ns=10**7, lost=()):
    """Cross traffic whose rate changes every 0.1 s of the first window, in frames of 1514 bytes."""
    window = json.loads((sweep / "points.jsonl").read_text().splitlines()[0])
    path = sweep / window["directory"] / "nodes" / "S0" / "nic" / "nic.rec"
    path.unlink()
    writer = RecordWriter(path, counter_fields(["cross0"]), {})
    start_ns, end_ns = window["window_start_ns"], window["window_end_ns"]
    t_ns, carried = start_ns - 10**8, 0.0
    while t_ns < end_ns + 10**8:
        if not any(low <= t_ns - start_ns < high for low, high in lost):
            writer.append(t_ns, t_ns - START_NS, round(carried), 0, round(carried / 1514), *[0] * 5)
        carried += rates_bps[(t_ns - start_ns) // 10**8 % len(rates_bps)] * sample_ns / 8e9
        t_ns += sample_ns
    writer.close()
    return (end_ns - start_ns) // 10**8


def test_the_deviation_of_the_load_is_that_of_its_rate_in_bins_of_a_tenth_of_a_second(tmp_path):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(10.0,), iterations=9)
    bins = write_square_wave(tmp_path / "sweep", (60e6, 140e6))
    assert bins > 20
    (point,) = measure(read_run(tmp_path / "sweep"))
    # an even or odd number of bins of 60 and 140 Mbit/s; the packet counter is whole frames, of up to 0.1 Mbit/s
    assert point.unscaled_cross_std_bps == pytest.approx(
        np.std([60e6, 140e6] * (bins // 2) + [60e6] * (bins % 2), ddof=1), rel=0.005
    )
    assert point.cross_std_gbps == pytest.approx(point.unscaled_cross_std_bps / 1e7)
    assert point.reasons == ()


def test_the_deviation_of_a_load_that_was_not_sampled_in_between_has_a_reason(tmp_path):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(10.0,), iterations=9)
    write_square_wave(tmp_path / "sweep", (60e6, 140e6), lost=[(10**9, 115 * 10**7)])
    (point,) = measure(read_run(tmp_path / "sweep"))
    assert (point.unscaled_cross_bps is None, point.unscaled_cross_std_bps) == (False, None)
    assert point.reasons == (
        "standard deviation of the cross traffic: the counters of node S0 have gaps of more than a bin",
    )


def test_the_deviation_of_acknowledged_traffic_has_a_reason(tmp_path):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(10.0,), iterations=9)
    info = json.loads((tmp_path / "sweep" / "run.json").read_text())
    edit_info(tmp_path / "sweep", bottleneck=info["bottleneck"] | {"cross": "acknowledged"})
    line = json.loads((tmp_path / "sweep" / "points.jsonl").read_text())
    (tmp_path / "sweep" / "points.jsonl").write_text(json.dumps(line | {"cross_bps": 1e8}) + "\n")
    (point,) = measure(read_run(tmp_path / "sweep"))
    assert (point.unscaled_cross_bps, point.unscaled_cross_std_bps) == (1e8, None)
    assert "only the mean of what the receiver acknowledged" in point.reasons[0]


def test_a_window_without_iterations_says_so(tmp_path):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    for path in (tmp_path / "sweep").glob("series/*/nodes/*/steps/*.rec"):
        path.unlink()
    point = measure(read_run(tmp_path / "sweep"))[0]
    assert (point.iterations, point.mean_s) == (0, None)
    assert any("no iteration" in reason for reason in point.reasons)


def test_attempts_of_a_series_are_one_series(tmp_path):
    path = tmp_path / "sweep"
    write_sweep(path, [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    lines = (path / "points.jsonl").read_text().splitlines()
    (path / "series" / "vgg16-consistent-1").rename(path / "series" / "vgg16-consistent-2")
    again = [line.replace("consistent-1", "consistent-2") for line in lines]
    (path / "points.jsonl").write_text("\n".join(again) + "\n" + lines[0][:40])
    run = read_run(path)
    assert run.series == ["vgg16-consistent"]
    assert len(Sweep(run).points) == 2
    assert run.torn == {"points.jsonl": 1}


BACKWARDS = {"series": "a", "model": "a", "traffic": "b", "directory": "c", "requested_bps": -1}
BACKWARDS |= {"window_start_ns": 1, "window_end_ns": 2}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("3", "not an object"),
        ("{}", "has no series"),
        (json.dumps(BACKWARDS), "requested_bps"),
        ("{nonsense", "not JSON"),
    ],
)
def test_bad_lines_of_points_name_the_line(tmp_path, line, says):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 10.0), iterations=5)
    path = tmp_path / "sweep" / "points.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match=says) as caught:
        read_run(tmp_path / "sweep")
    assert "line 3" in str(caught.value)


def test_a_directory_outside_the_sweep_is_refused(sweep):
    with pytest.raises(UsageError, match="outside"):
        read_run(sweep[0]).job("../other")


def test_newer_schemas_and_other_folders_are_refused(tmp_path, sweep):
    with pytest.raises(UsageError, match="not a run directory"):
        read_run(tmp_path)
    RunDirectory.create(tmp_path / "new", "sweep", [], 1)
    edit_info(tmp_path / "new", schema=99)
    with pytest.raises(UsageError, match="upgrade ringtap"):
        read_run(tmp_path / "new")
    edit_info(tmp_path / "new", schema=1, kind="parade")
    with pytest.raises(UsageError, match="parade"):
        read_run(tmp_path / "new")
    edit_info(tmp_path / "new", kind="sweep")
    with pytest.raises(UsageError, match="no plan"):
        _ = read_run(tmp_path / "new").plan


def test_addresses_of_a_socket_log_can_be_printed(tmp_path):
    node = Node(RunDirectory.create(tmp_path / "job", "job", [], 1), "n0")
    node.sockets([Socket(1, ("10.0.0.1", 1000), ("10.0.0.2", 2000)).record(START_NS)] * 2, 0.1, {})
    table, torn = read_records(node.path / "sockets" / "sockets.rec")
    assert torn == 0
    assert table["source"].iloc[0][:4] == bytes([10, 0, 0, 1])
    assert table["dport"].iloc[0] == (2000).to_bytes(2, "big")
    assert table.groupby("source")["bytes_acked"].sum().tolist() == [0]
    assert len(repr(table)) > 0
    assert len(table.describe(include="all")) > 0


def set_clock(log, columns, after_mono_ns, step_ns):
    """Let the clock of a log have been set."""
    file = open_records(log)
    data = bytearray(log.read_bytes())
    records = np.frombuffer(data, np.dtype([(field.name, field.type) for field in file.fields]), offset=file.offset)
    for wall, mono in columns:
        records[wall][records[mono] > after_mono_ns] += step_ns
    log.write_bytes(data)


@pytest.mark.parametrize("step_s", [1, -1, 3600, -3600])
def test_a_clock_that_is_set_during_a_sweep_changes_no_point(tmp_path, step_s):
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 12.5))
    expected = measure(ringtap.open_sweep(tmp_path / "sweep").run)
    job = tmp_path / "sweep" / expected[0].directory / "nodes"
    for log in (job / "switch/nic/nic.rec", job / "S0/nic/nic.rec"):
        set_clock(log, [("t_ns", "mono_ns")], 5 * 10**9, step_s * 10**9)
    steps = [("start_ns", "start_mono_ns"), ("end_ns", "end_mono_ns")]
    for host in ("S0", "S1"):
        (log,) = (job / host / "steps").glob("rank*.rec")
        set_clock(log, steps, 5 * 10**9, step_s * 10**9)
    found = measure(ringtap.open_sweep(tmp_path / "sweep").run)
    assert found == expected
    assert [one.iteration_s.tolist() for one in found] == [one.iteration_s.tolist() for one in expected]
    assert all(one.unscaled_cross_bps is not None for one in found)


AHEAD_NS = {"S0": 0, "S1": 50_000_000, "S3": -30_000_000, "switch": 120_000_000}


def test_clocks_that_differ_change_no_point_and_no_iteration_of_its_job(tmp_path):
    """Each time another rank is the last, and by the clocks of the hosts always the same one."""
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")], loads_gbps=(0.0, 12.5))
    expected = measure(ringtap.open_sweep(tmp_path / "sweep").run)
    directory = expected[0].directory
    own_ns = set_ahead(tmp_path / "sweep" / directory, AHEAD_NS, "S0")
    retime_windows(tmp_path / "sweep" / "points.jsonl", directory, own_ns)
    sweep = ringtap.open_sweep(tmp_path / "sweep")
    found = measure(sweep.run)
    assert [one.iteration_s.tolist() for one in found] == [one.iteration_s.tolist() for one in expected]
    for name in ("window_s", "unscaled_cross_bps", "unscaled_total_bps", "unscaled_cross_std_bps"):
        assert [getattr(one, name) for one in found] == pytest.approx([getattr(one, name) for one in expected])
    columns = ["start_ns", "end_ns", "iteration_s"]
    job = sweep.run.job(directory)
    pd.testing.assert_frame_equal(job.iterations[columns], open_job(job.path).iterations[columns], check_dtype=False)


@pytest.mark.parametrize("step_ms", [15, -90, 3_600_000])
def test_a_clock_that_is_set_without_a_note_changes_no_iteration(tmp_path, step_ms):
    write_job(tmp_path / "job", [0.2] * 20, [(5.0, 0.0, 1e6)])
    expected = read_run(tmp_path / "job").iterations
    (log,) = (tmp_path / "job/nodes/S0/steps").glob("rank*.rec")
    columns = [("start_ns", "start_mono_ns"), ("end_ns", "end_mono_ns")]
    set_clock(log, columns, 2 * 10**9 + 550_000_000, step_ms * 1_000_000)
    pd.testing.assert_frame_equal(read_run(tmp_path / "job").iterations, expected)
    with pytest.warns(RingtapWarning, match="the clock of S0 was set during the run and clock/clock.json does not say"):
        found = open_job(tmp_path / "job").iterations
    assert found["iteration_s"].tolist() == expected["iteration_s"].tolist()


def test_a_time_between_ends_moves_as_the_nearest_end(tmp_path):
    job = RunDirectory.create(tmp_path / "job", "job", [], 1)
    assert window_on_reference((3, 5), read_run(job.path)) == (3, 5)
    add_steps(job, "rank0-10.rec", [0, 1, 2])
    add_steps(job, "rank1-11.rec", [0, 1, 2], node="S1")
    set_ahead(job.path, {"S0": 0, "S1": 40_000_000}, "S0")
    window_ns = START_NS + 10**9 + 7, START_NS + 2 * 10**9 + 40_000_000
    assert window_on_reference(window_ns, read_run(job.path)) == (window_ns[0] - 40_000_000, START_NS + 2 * 10**9)
