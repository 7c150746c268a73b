"""Which steps are iterations: each row of docs/reference/iterations.md, from records whose phases are known."""

import json

import numpy as np
import pandas as pd
import pytest

from ringtap.analysis.compare.run_comparison import compare_runs
from ringtap.analysis.job.run import Job, open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.job.summary_text import describe
from ringtap.analysis.live.follow_run import RunFollower
from ringtap.analysis.runs.group_steps_into_iterations import EACH, MARKED, MOST, ROUND, find_stretches, find_worlds
from ringtap.cli import main
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter, open_records
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import MARK_RECORD

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

MS = 1_000_000
START_NS = 1_700_000_000_000_000_000
NAMES = ("step", "optimizer", "start_ns", "end_ns", "start_mono_ns", "end_mono_ns", "kind", "backwards", "pause_ns")


class Run:
    """Writes the step logs of a job as the hook does."""

    def __init__(self, path):
        self.path = path
        self._directory = RunDirectory.create(path, "job", [], 1)

    def process(self, steps, rank=0, pid=50, size=1, node="n0", name="", age_ms=0, optimizers=(), **about):
        """``steps``: optimizer, ms of its end since the start, and ms of the step; optimizers: class and parameters."""
        folder = self._directory.node(node) / "steps"
        about = {"rank": rank, "pid": pid, "world_size": size, "age_ns": age_ms * MS, "command": 7} | about
        stem = folder / f"rank{rank}-{pid}{name}"
        fields = [Field(column, "<i8", "", "gauge") for column in (*NAMES, "passes_ns")]
        writer = RecordWriter(stem.with_name(stem.name + ".rec"), fields, about)
        counts = {}
        for optimizer, end_ms, *more in steps:
            number = counts[optimizer] = counts.get(optimizer, -1) + 1
            length, passes, kind = (*more, 1, 0, 0)[:3] if len(more) < 3 else more
            end_ns = START_NS + round(end_ms * MS)
            times = (end_ns - length * MS, end_ns)
            mono = tuple(value - START_NS + 10**12 for value in times)
            writer.append(number, optimizer, *times, *mono, kind, 1, 0, round(passes * MS))
        writer.close()
        lines = JsonLinesWriter(stem.with_name(stem.name + ".optimizers.jsonl"))
        for number, (kind, elements) in enumerate(optimizers):
            lines.append({"optimizer": number, "class": kind, "elements": elements, "trained": elements})
        lines.close()
        return self

    def open(self, **more) -> Job:
        return open_job(self.path, **more)


def every(ms, count, optimizer=0, begin_ms=0):
    return [(optimizer, begin_ms + (number + 1) * ms) for number in range(count)]


def phases_of(job):
    table = job.phases
    names = ["ranks", "starts", "stretches", "steps", "left_out", "iterations"]
    return [tuple(row) for row in table[names].to_numpy().tolist()], table["iteration_median_s"].tolist()


SGD = ("SGD", 100)


def test_a_new_optimizer_per_epoch_goes_on_with_the_phase(tmp_path):
    steps, begin_ms = [], 0
    for epoch in range(5):
        steps += every(10 * (epoch + 1), 20, epoch, begin_ms)
        begin_ms = steps[-1][1]
    job = Run(tmp_path / "run").process(steps, optimizers=[SGD] * 5).open()
    assert phases_of(job) == ([(1, 1, 5, 100, 0, 95)], [0.03])
    assert (job.iterations["iteration_s"].min(), job.iterations["iteration_s"].max()) == (0.01, 0.05)
    text = job.report()
    assert "The phase has 5 stretches, each with an optimizer of its own; its iterations take 10 ms to 50 ms." in text
    assert "Nothing marks the beginning of the first step of 5 stretches (100 steps in all)." in text
    assert job.iterations["warm_up"].sum() == 1  # of the first stretch


def test_fine_tuning_of_the_head_and_of_all_layers_are_two_phases(tmp_path):
    run = Run(tmp_path / "run")
    for rank in (0, 1):
        steps = [*every(37, 10), *every(216, 20, 1, 370)]
        run.process(steps, rank, 60 + rank, 2, optimizers=[("SGD", 10), ("SGD", 100)], group="torch", address="h:1")
    job = run.open()
    assert phases_of(job) == ([(2, 1, 1, 20, 0, 9), (2, 1, 1, 40, 0, 19)], [0.037, 0.216])
    assert job.phases["shown"].tolist() == [False, True]
    text = job.report()
    assert text.startswith("An iteration of phase 2 takes 216 ms (mean)")
    assert "2 phases; all that follows is of phase 2 (--phase N)." in text
    assert "SGD of 10 parameters" in text
    first = run.open(phase=1)
    assert first.iterations["iteration_s"].tolist() == pytest.approx([0.037] * 9)
    assert first.report().startswith("An iteration of phase 1 takes 37 ms (mean)")
    other = Run(tmp_path / "other").process(every(100, 30), optimizers=[SGD]).open()
    (note,) = [line for line in compare_runs([job, other]).reasons if "training phases" in line]
    assert note == "run has 2 training phases; phase 2 is compared (SGD of 100 parameters)."
    live = RunFollower(tmp_path / "run")
    live.poll()
    assert {rank.steps_s[-1] for rank in live.ranks} == {0.216}


def test_optimizers_without_a_description_are_phases_of_their_own(tmp_path):
    """As in logs of 0.2: nothing says that they are alike."""
    job = Run(tmp_path / "run").process([*every(10, 20), *every(10, 30, 1, 200)]).open()
    assert phases_of(job)[0] == [(1, 1, 1, 20, 0, 19), (1, 1, 1, 30, 0, 29)]


def test_a_round_of_a_gan_is_an_iteration(tmp_path):
    steps = [
        (int(place == 5), 333 * number + 65 * (place + 1) - 57 * (place == 5))
        for number in range(12)
        for place in range(6)
    ]
    job = Run(tmp_path / "run").process(steps, optimizers=[("Adam", 5), ("Adam", 6)]).open()
    assert phases_of(job) == ([(1, 1, 1, 72, 0, 11)], [0.333])
    text = job.report()
    assert (
        "An iteration is a round of the optimizers: 5 steps of Adam of 5 parameters, 1 step of Adam of 6 parameters."
        in text
    )
    assert job.rank_iterations["optimizer_s"].tolist() == pytest.approx([0.006] * 11)  # of all six steps
    live = RunFollower(tmp_path / "run")
    live.poll()
    assert set(live.ranks[0].steps_s) == {0.333}


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ([0] + [1] * 50, [(EACH, 1, {0: 1}), (EACH, 50, {1: 1})]),
        ([0, 1] * 6, [(ROUND, 6, {0: 1, 1: 1})]),
        ([0, 1] * 6 + [0], [(ROUND, 6, {0: 1, 1: 1})]),
        (list(range(300)) * 4, [(ROUND, 4, dict.fromkeys(range(300), 1))]),
        ([0, 0, 1, 0] * 12, [(ROUND, 12, {0: 3, 1: 1})]),
        ([0] * 10 + [1] + [0] * 3 + [1] + [0] * 7 + [1] + [0] * 2, [(MOST, 22, {0: 1, 1: 0})]),
        (([0] * 80 + [1] * 80) * 2, [(EACH, 80, {0: 1}), (EACH, 80, {1: 1})] * 2),
        ([0] * 30 + [1, 0] * 5, [(EACH, 30, {0: 1}), (ROUND, 5, {0: 1, 1: 1})]),
    ],
    ids=["throw-away", "two", "incomplete", "per layer", "uneven", "irregular", "by turns", "pre-training"],
)
def test_steps_are_split_into_stretches(optimizers, expected):
    found = find_stretches(np.array(optimizers), np.zeros(len(optimizers), int))
    if expected[-1][0] == ROUND and optimizers[:30] == [0] * 30:
        assert found[0].mode == EACH
        found[1:] = [stretch for stretch in found[1:] if stretch.mode == ROUND]
        expected = [(EACH, 30, {0: 1}), (ROUND, len(found[1].ends), {0: 1, 1: 1})]
    assert [(stretch.mode, len(stretch.ends), dict(stretch.counts)) for stretch in found] == expected


def test_marks_count_and_what_is_outside_of_them_is_not_lost(tmp_path):
    before = [(0, 10 * number) for number in range(1, 31)]
    marked = []
    for number in range(20):
        marked += [
            (0, 400 + 50 * number + 10),
            (1, 400 + 50 * number + 20),
            (-1, 400 + 50 * number + 30, 0, 0, MARK_RECORD),
        ]
    job = Run(tmp_path / "run").process([*before, *marked], optimizers=[SGD, SGD]).open()
    assert phases_of(job) == ([(1, 1, 1, 30, 0, 29), (1, 1, 1, 40, 0, 19)], [0.01, 0.05])
    assert job.phases["mode"].tolist() == [EACH, MARKED]


def test_jobs_of_other_sizes_are_phases(tmp_path):
    run = Run(tmp_path / "run")
    run.process(every(81, 40), 0, 10, 1, group="torch", address="h:1", optimizers=[SGD])
    for rank in (0, 1):
        run.process(every(189, 40, 0, 9000), rank, 20 + rank, 2, group="torch", address="h:2", optimizers=[SGD])
    assert phases_of(run.open()) == ([(1, 1, 1, 40, 0, 39), (2, 1, 1, 80, 0, 39)], [0.081, 0.189])


def test_a_restart_joins_ranks_by_time_and_not_by_their_number_of_starts(tmp_path):
    """Rank 1 died before its first step, so its first log is of the second start."""
    run = Run(tmp_path / "run")
    common = {"group": "torch", "address": "h:1", "size": 2, "optimizers": [SGD]}
    run.process(every(50, 5), 0, 10, **common)
    for rank in (0, 1):
        run.process(every(20, 30, 0, 5000), rank, 20 + rank, age_ms=900, **common)
    job = run.open()
    assert phases_of(job) == ([(2, 2, 2, 65, 0, 33)], [0.02])
    assert job.iterations["generation"].tolist() == [0] * 4 + [1] * 29
    assert "The ranks began again 1 time: the job was started again, or joined another process group." in job.report()


def test_os_execv_starts_the_job_again(tmp_path):
    run = Run(tmp_path / "run")
    for number in range(3):
        begin_ms = 1000 * number
        run.process(every(20, 20, 0, begin_ms), name=f"-{number + 1}" if number else "", age_ms=30, optimizers=[SGD])
    assert phases_of(run.open()) == ([(1, 3, 3, 60, 0, 57)], [0.02])


def test_two_launches_at_once_are_a_phase_each(tmp_path):
    run = Run(tmp_path / "run")
    for launch in (0, 1):
        for rank in (0, 1):
            steps = every(80 + 10 * launch, 40)
            run.process(
                steps, rank, 10 * (launch + 1) + rank, 2, group="torch", address=f"localhost:{launch}", optimizers=[SGD]
            )
    job = run.open()
    assert phases_of(job) == ([(2, 1, 1, 80, 0, 39)] * 2, [0.08, 0.09])
    assert "Other processes, not ranks of its process group, trained at the same time: phase 1." in job.report()
    assert job.ranks["sent_bytes"].isna().all()


def test_a_helper_does_not_replace_its_rank(tmp_path):
    run = Run(tmp_path / "run")
    for rank in (0, 1):
        run.process(every(95, 60), rank, 10 + rank, 2, group="torch", address="h:1", optimizers=[SGD])
    run.process(every(8, 500), 0, 30, 2, group="", address="h:1", optimizers=[SGD])
    job = run.open()
    assert phases_of(job)[0] == [(1, 1, 1, 500, 0, 499), (2, 1, 1, 120, 0, 59)]
    assert job.iterations["iteration_s"].median() == 0.095
    live = RunFollower(tmp_path / "run")
    live.poll()
    assert {rank.pid for rank in live.ranks if rank.counts} == {10, 11}


def test_a_probe_within_a_rank_is_a_phase_of_that_rank(tmp_path):
    run = Run(tmp_path / "run")
    common = {"group": "torch", "address": "h:1", "size": 2}
    run.process([*every(5, 20), *every(50, 30, 1, 100)], 0, 10, optimizers=[("SGD", 7), SGD], **common)
    run.process(every(50, 30, 0, 100), 1, 11, optimizers=[SGD], **common)
    job = run.open()
    assert phases_of(job) == ([(1, 1, 1, 20, 0, 19), (2, 1, 1, 60, 0, 29)], [0.005, 0.05])
    assert job.iterations["iteration_s"].tolist() == pytest.approx([0.05] * 29)


def test_steps_before_a_process_group_are_phases_of_their_processes(tmp_path):
    run = Run(tmp_path / "run")
    for rank in (0, 1):
        run.process(every(10, 5), 0, 40 + rank, 1, age_ms=900, optimizers=[SGD])
        run.process(
            every(30, 30, 1, 500), rank, 40 + rank, 2, name="-2", group="torch", address="h:1", optimizers=[SGD, SGD]
        )
    assert phases_of(run.open())[0] == [(1, 1, 1, 5, 0, 4), (1, 1, 1, 5, 0, 4), (2, 1, 1, 60, 0, 29)]


def test_steps_in_no_iteration_are_counted(tmp_path):
    steps = [(number % 3, 10 * (number + 1)) for number in range(62)]
    job = Run(tmp_path / "run").process(steps, optimizers=[SGD, SGD, SGD]).open()
    assert phases_of(job)[0] == [(1, 1, 1, 62, 2, 19)]
    assert "2 recorded steps of phase 1 are in no whole iteration." in job.report()


def test_processes_without_a_group_are_phases(tmp_path):
    run = Run(tmp_path / "run")
    for number in range(12):
        run.process(every(10 + number, 30), 0, 100 + number, optimizers=[SGD])
    job = run.open()
    assert len(job.phases) == 12
    text = job.report()
    assert "4 more phases, which took less time, are in --json." in text
    assert "pid 111" in text


@pytest.mark.parametrize(
    ("rows", "worlds"),
    [
        # node, rank, pid, size, group, address, begin, end
        ([("a", 0, 1, 2, "torch", "h:1", 0, 9), ("b", 1, 2, 2, "torch", "localhost:1", 0, 9)], [0, 0]),
        ([("a", 0, 1, 2, "torch", "h:1", 0, 9), ("a", 0, 2, 2, "torch", "g:1", 0, 9)], [0, 1]),
        ([("a", 0, 1, 2, "torch", "h:1", 0, 9), ("a", 1, 2, 2, "torch", "h:2", 0, 9)], [0, 1]),
        ([("a", 0, 1, 2, "torch", "h:1", 0, 9), ("a", 0, 2, 2, "torch", "h:1", 5, 9)], [0, 1]),
        ([("a", 0, 1, 0, "", "", 0, 9), ("a", 1, 2, 0, "", "", 0, 9)], [0, 0]),
        ([("a", 0, 1, 1, "", "", 0, 9), ("a", 1, 2, 1, "", "", 0, 9)], [0, 0]),
        ([("a", 0, 1, 1, "", "", 0, 9), ("a", 0, 2, 1, "", "", 0, 9)], [0, 1]),
    ],
    ids=[
        "other names of a host",
        "one port on two hosts",
        "two meetings",
        "no way to tell",
        "no size",
        "contradiction",
        "alone",
    ],
)
def test_worlds_follow_from_the_headers(rows, worlds):
    names = ["node", "rank", "pid", "world_size", "group", "address", "begin_ns", "end_ns"]
    table = pd.DataFrame(rows, columns=names).assign(command=7)
    assert find_worlds(table)["world"].tolist() == worlds


def test_the_phase_is_an_option_of_commands(tmp_path, capsys):
    path = tmp_path / "run"
    Run(path).process([*every(10, 20), *every(30, 30, 1, 200)], optimizers=[SGD, ("Adam", 9)])
    assert main(["analyze", str(path), "--phase", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["shown"] for row in data["training_phases"]] == [True, False]
    assert data["iterations"]["median_s"] == pytest.approx(0.01)
    assert main(["analyze", str(path), "--json"]) == 0  # not the tables of the phase before
    assert json.loads(capsys.readouterr().out)["iterations"]["median_s"] == pytest.approx(0.03)
    assert main(["report", str(path), "--phase", "1"]) == 0
    assert "phase 1" in capsys.readouterr().out
    for wrong, words in (("3", "has no training phase 3: its phases are 1 to 2"), ("0", "phase 0 does not exist")):
        assert main(["analyze", str(path), "--phase", wrong]) == 2
        assert words in capsys.readouterr().err
    pytest.importorskip("pyarrow")
    assert main(["export", str(path), "--to", "csv", "-o", str(tmp_path / "csv")]) == 0
    assert len((tmp_path / "csv" / "phases.csv").read_text().splitlines()) == 3


def test_a_trace_has_all_phases_and_steps_without_the_passes_within(tmp_path):
    pytest.importorskip("perfetto")
    from tests.unit.analysis.export.test_perfetto import export, slices_of

    closures = [(1, 1000 + 100 * number, 80, 70) for number in range(10)]
    run = Run(tmp_path / "run").process([*every(50, 18), *closures], optimizers=[SGD, ("LBFGS", 100)])
    tracks = export(run.path, tmp_path / "trace.gz")[1]
    spans = [end - begin for begin, end, *_ in slices_of(tracks, "rank 0", "optimizer")]
    assert spans == [MS] * 18 + [10 * MS] * 10
    assert len(slices_of(tracks, "job", "iterations")) == 17 + 9


def test_a_communication_hook_and_sharded_optimizers_are_named(tmp_path):
    from tests.gold.job_run import Truth, write_ddp_job

    write_ddp_job(tmp_path / "job", Truth(iterations=20))
    assert summarize(open_job(tmp_path / "job"))["demand"]["expected_bytes"] is not None
    for path in (tmp_path / "job").glob("nodes/*/steps/*.buckets.jsonl"):
        lines = [json.loads(line) | {"comm_hook": "fp16_compress_hook"} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = open_job(tmp_path / "job")
    demand = summarize(job)["demand"]
    assert (demand["expected_bytes"], demand["difference"]) == (None, None)
    assert demand["why"] == "gradients are exchanged by the communication hook fp16_compress_hook"
    assert "does not say how much it should be: gradients are exchanged by the communication hook" in job.report()
    run = Run(tmp_path / "zero")
    for rank in (0, 1):
        optimizers = [("ZeroRedundancyOptimizer", 9)]
        run.process(every(50, 30), rank, 10 + rank, 2, group="torch", address="h:1", optimizers=optimizers)
    assert summarize(run.open())["demand"]["why"] == "ZeroRedundancyOptimizer sends parameters, too"


@pytest.mark.parametrize(
    ("recorders", "words"),
    [
        (
            ["steps", "ddp"],
            "only exchanges by DistributedDataParallel and Horovod are timed, and none was recorded (Horovod on GPUs:",
        ),
        (["steps", "ddp", "horovod"], "are timed, and none was recorded."),
        (["steps"], "DDP's own times were not recorded (--collect ddp)"),
    ],
)
def test_the_reason_for_unknown_parts_is_that_of_the_settings(tmp_path, recorders, words):
    run = Run(tmp_path / "run").process(every(50, 30), optimizers=[SGD])
    path = run.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": {"recorders": recorders}}))
    (line,) = (line for line in run.open().report().splitlines() if "where its time goes is not known" in line)
    assert words in line


def test_parts_that_take_longer_than_the_iteration_are_refused(tmp_path):
    from tests.gold.job_run import Truth, write_ddp_job

    write_ddp_job(tmp_path / "job", Truth(iterations=8))
    for path in (tmp_path / "job").glob("nodes/*/steps/*.ddp.rec"):
        file = open_records(path)
        records = np.fromfile(path, np.dtype([(one.name, one.type) for one in file.fields]), offset=file.offset)
        records["forward_ns"] *= 4
        with path.open("r+b") as stream:
            stream.seek(file.offset)
            stream.write(records.tobytes())
    data = summarize(open_job(tmp_path / "job"))
    assert data["parts"]["compute_s"] is None
    assert "in an iteration of 200 ms: passes ran at the same time" in data["parts"]["why"]
    text = "\n".join(describe(data))
    assert "where its time goes is not known, for rank 0 has forward and backward passes and optimizer steps of" in text


def two_phases(path):
    """A run of two ranks and two phases, and the log of rank 1."""
    run = Run(path)
    for rank in (0, 1):
        steps = [*every(37, 10), *every(100, 20, 1, 370)]
        run.process(steps, rank, 60 + rank, 2, optimizers=[("SGD", 10), SGD], group="torch", address="h:1")
    return run, path / "nodes" / "n0" / "steps" / "rank1-61.rec"


def test_torn_and_damaged_logs_leave_the_other_steps_in_their_phases(tmp_path):
    """A killed rank tore its last record, its description of an optimizer, and left a log without a header."""
    run, log = two_phases(tmp_path / "run")
    log.write_bytes(log.read_bytes()[:-8])
    lines = log.with_name("rank1-61.optimizers.jsonl")
    lines.write_text(lines.read_text()[:-10])
    log.with_name("rank1-99.rec").write_bytes(b"")
    job = run.open()
    assert [row[:5] for row in phases_of(job)[0]] == [(2, 1, 1, 20, 0), (2, 1, 1, 39, 1)]
    text = job.report()
    assert "1 recorded step of phase 2 is in no whole iteration." in text
    assert "nodes/n0/steps/rank1-61.rec, nodes/n0/steps/rank1-99.rec end in a torn record, which was dropped" in text


def test_a_clock_that_is_set_changes_no_phase(tmp_path):
    """Rank 1's clock is set back by an hour within the second phase: steps stay in order, and times as they were."""
    run, log = two_phases(tmp_path / "run")
    file = open_records(log)
    rows = [list(row) for row in file.tail()]
    log.unlink()
    writer = RecordWriter(log, list(file.fields), dict(file.about))
    for number, row in enumerate(rows):
        back_ns = 3600 * 10**9 if number > 20 else 0
        writer.append(*row[:2], row[2] - back_ns, row[3] - back_ns, *row[4:])
    writer.close()
    step = {"mono_before_ns": rows[20][5], "mono_ns": rows[21][4], "t_ns": rows[21][2] - 3600 * 10**9}
    step["step_ns"] = -3600 * 10**9
    (run.path / "nodes" / "n0" / "node.json").write_text(json.dumps({"clock_steps": [step]}))
    job = run.open()
    assert [row[:5] for row in phases_of(job)[0]] == [(2, 1, 1, 20, 0), (2, 1, 1, 40, 0)]
    assert job.rank_iterations["iteration_s"].to_numpy() == pytest.approx(0.1)
