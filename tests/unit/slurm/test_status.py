"""What is said of submitted runs: from files alone, and with each answer that Slurm may give."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.cli import main
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.slurm.job_state_file import JobReport, note, read_report
from ringtap.slurm.query_job_states import STATES, SlurmJobState, ask_slurm
from ringtap.slurm.status import NOT_BEGUN, SeriesStanding, Standing, lines, standing
from ringtap.slurm.submission_file_names import SubmitPaths

pytestmark = pytest.mark.shares

Squeue = Callable[[str, int], Path]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """Gives Slurm an answer; returns the file that the questions are kept in."""
    folder, asked = tmp_path / "bin", tmp_path / "asked"
    folder.mkdir()

    def answers(text: str, code: int = 0) -> Path:
        # printed as it is on success, and as a complaint on failure
        (folder / "squeue").write_text(
            f"#!/bin/sh\necho \"$*\" >>'{asked}'\ncat >&{2 if code else 1} <<'END'\n{text}\nEND\nexit {code}\n"
        )
        (folder / "squeue").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return asked

    return answers


def submitted(path: Path, kind: Any = "job", **info: Any) -> RunDirectory:
    """A run directory as ringtap submit leaves it, with job 7."""
    run = RunDirectory.create(path, kind, ["ringtap", "submit"], 0, **info)
    run.finish("running", NOT_BEGUN)
    paths = SubmitPaths(path)
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [{"id": "7", "submitted_ns": 1}], "tasks": [[0, 1]]})
    return run


def node(run: RunDirectory, name: str, status: str, why: str = "", done: bool = True) -> None:
    folder = run.node(name)
    write_json(folder / "node.json", {"status": status, "why": why, "collectors": {}})
    if done:
        (folder / "DONE").touch()


def say(run: RunDirectory, job: str, *lines: str) -> None:
    SubmitPaths(run.path).state(job).write_text("".join(f"{line}\n" for line in lines))


def test_an_account_is_that_of_the_last_beginning(tmp_path: Path) -> None:
    run = submitted(tmp_path / "run")
    paths = SubmitPaths(run.path)
    assert read_report(paths, "7") == JobReport("7")
    say(
        run,
        "7",
        "100 begun on n0",
        "101 recording 2 of 2 nodes",
        "150 stopped USR1",
        "151 stopped TERM",
        "160 ended 143",
    )
    assert read_report(paths, "7") == JobReport("7", 100, "n0", "USR1", 143)
    say(run, "7", "100 begun on n0", "160 ended 0", "161 stopped TERM")
    assert read_report(paths, "7") == JobReport("7", 100, "n0", "TERM", 0)
    say(run, "7", "100 begun on n0", "160 ended 143", "200 begun on n1")
    assert read_report(paths, "7") == JobReport("7", 200, "n1")


@given(st.binary(max_size=200))
def test_a_damaged_account_is_no_trouble(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    paths = SubmitPaths(tmp_path_factory.getbasetemp() / "damaged")
    paths.states.mkdir(parents=True, exist_ok=True)
    paths.state("7").write_bytes(data)
    assert read_report(paths, "7").job == "7"


def test_slurm_is_asked_for_all_jobs_at_once(squeue: Squeue) -> None:
    asked = squeue("7_0|RUNNING|None|n[0-2]\n7_1|PENDING|JobArrayTaskLimit|\n9|COMPLETED|None|n1", 0)
    found = ask_slurm(["7_0", "7_1", "8", "9"])
    assert found == {
        "7_0": SlurmJobState("RUNNING", "", "n[0-2]"),
        "7_1": SlurmJobState("PENDING", "JobArrayTaskLimit"),
        "8": SlurmJobState("FORGOTTEN"),
        "9": SlurmJobState("COMPLETED", "", "n1"),
    }
    (question,) = asked.read_text().splitlines()
    assert "--jobs=7,8,9" in question


def test_jobs_that_slurm_has_forgotten_are_no_error(squeue: Squeue) -> None:
    squeue("slurm_load_jobs error: Invalid job id specified", 1)
    assert ask_slurm(["7"]) == {"7": SlurmJobState("FORGOTTEN")}


def test_jobs_that_the_controller_has_forgotten_are_in_the_accounts(squeue: Squeue, tmp_path: Path) -> None:
    squeue("9|RUNNING|None|n3", 0)
    # as sacct of Slurm 22.05 prints it with slurmdbd
    recorded = "1|COMPLETED|n0\n2|FAILED|n0\n3|CANCELLED by 60001|n0\n4_1|TIMEOUT|n[0-1]\n"
    (tmp_path / "bin" / "sacct").write_text(f"#!/bin/sh\nprintf '{recorded}'\n")
    (tmp_path / "bin" / "sacct").chmod(0o755)
    assert ask_slurm(["1", "3", "4_1", "5", "9"]) == {
        "1": SlurmJobState("COMPLETED", "", "n0"),
        "3": SlurmJobState("CANCELLED", "", "n0"),
        "4_1": SlurmJobState("TIMEOUT", "", "n[0-1]"),
        "5": SlurmJobState("FORGOTTEN"),
        "9": SlurmJobState("RUNNING", "", "n3"),
    }


def test_a_controller_that_is_down_is_an_error(squeue: Squeue, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)
    with pytest.raises(MeasurementError, match=r"gave no answer: .*connect failure"):
        ask_slurm(["7"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MeasurementError, match="cannot be asked from here"):
        ask_slurm(["7"])


def test_a_job_of_another_user_is_another_job(squeue: Squeue) -> None:
    squeue(f"7|RUNNING|None|n0|{os.getuid() + 1}\n8|RUNNING|None|n0|{os.getuid()}", 0)
    assert ask_slurm(["7", "8"], os.getuid()) == {
        "7": SlurmJobState("FORGOTTEN"),
        "8": SlurmJobState("RUNNING", "", "n0"),
    }


def test_accounts_in_which_a_forgotten_job_still_runs_are_not_believed(squeue: Squeue, tmp_path: Path) -> None:
    squeue("slurm_load_jobs error: Invalid job id specified", 1)
    (tmp_path / "bin" / "sacct").write_text("#!/bin/sh\nprintf '7|RUNNING|n0\\n8|OUT_OF_MEMORY|n0\\n'\n")
    (tmp_path / "bin" / "sacct").chmod(0o755)
    assert ask_slurm(["7", "8"]) == {"7": SlurmJobState("FORGOTTEN"), "8": SlurmJobState("OUT_OF_MEMORY", "", "n0")}


@pytest.mark.parametrize("state", [*STATES, "A_NEW_ONE"])
def test_each_state_of_slurm_has_a_sentence(state: str, tmp_path: Path, squeue: Squeue) -> None:
    squeue(f"7|{state}|None|n0|{os.getuid()}", 0)
    run = submitted(tmp_path / "run")
    say(run, "7", "100 begun on n0")
    found = standing(run)
    kind, meaning = STATES.get(state, ("unknown", "a state that this ringtap does not know"))
    assert found.jobs[0].state == kind
    assert found.jobs[0].why.startswith(f"Slurm says {state}: {meaning}")
    assert found.status == ("partial" if kind == "ended" else kind)


def test_a_run_that_is_complete_says_so_with_and_without_slurm(
    tmp_path: Path, squeue: Squeue, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue("slurm_load_jobs error: Invalid job id specified", 1)
    run = submitted(tmp_path / "run")
    node(run, "n0", "complete")
    say(run, "7", "100 begun on n0", "160 ended 0")
    run.finish("complete")
    found = standing(run)
    assert (found.status, found.why, found.not_asked) == ("complete", "", "")
    assert [(job.state, job.why) for job in found.jobs] == [("ended", "exit code 0")]
    monkeypatch.setenv("PATH", "/nowhere")
    found = standing(run)
    assert (found.status, found.why, found.not_asked) == ("complete", "", "")
    assert [(job.state, job.why) for job in found.jobs] == [("ended", "exit code 0 by its files")]


def test_slurm_has_the_last_word_about_a_run_that_was_complete(tmp_path: Path, squeue: Squeue) -> None:
    run = submitted(tmp_path / "run")
    node(run, "n0", "complete")
    say(run, "7", "100 begun on n0", "160 ended 0")
    run.finish("complete")
    squeue("7|PENDING|job requeued in held state||", 0)
    found = standing(run)
    why = "Slurm says PENDING (job requeued in held state): it waits to start; its last run ended: exit code 0"
    assert (found.status, found.why) == ("waiting", why)
    assert lines(found)[-1] == "  nodes: 1 complete"  # there is nothing to do but wait
    squeue("7|RUNNING|None|n1|", 0)
    assert (standing(run).status, standing(run).why) == ("running", "Slurm says RUNNING: it runs on n1")


@pytest.mark.parametrize(
    ("account", "answer", "status", "why"),
    [
        ([], "7|PENDING|Resources|", "waiting", "Slurm says PENDING (Resources): it waits to start"),
        (["100 begun on n0"], "7|RUNNING|None|n[0-1]", "running", "Slurm says RUNNING: it runs on n[0-1]"),
        (["100 begun on n0"], "7|COMPLETING|None|n0", "running", "Slurm says COMPLETING: it is ending on n0"),
        # begun anew: its account ends with the former life
        (
            ["100 begun on n0", "101 ended 143"],
            "7|PENDING|BeginTime|",
            "waiting",
            "Slurm says PENDING (BeginTime): it waits to start; its last run ended: exit code 143 (128 + SIGTERM)",
        ),
        # of Slurm 25.11, after a node failed under a job with --requeue=expedite
        (["100 begun on n0"], "7|EXPEDITING|Resources|", "waiting", "Slurm says EXPEDITING (Resources): it is back"),
        ([], "7|CANCELLED|None|", "partial", "Slurm says CANCELLED: it was cancelled; it never began"),
        (
            ["100 begun on n0"],
            "7|NODE_FAIL|NodeDown|n0",
            "partial",
            "Slurm says NODE_FAIL (NodeDown): a node of it failed; it has not said how it ended",
        ),
        ([], "", "partial", "Slurm does not know it any more; no file says that it began"),
        (["100 begun on n0"], "", "partial", "Slurm does not know it any more; it has not said how it ended"),
        (["100 begun on n0", "101 ended 1"], "7|FAILED|NonZeroExitCode|n0", "partial", "exit code 1"),
        (
            ["100 begun on n0", "101 ended 0"],
            "7|TIMEOUT|TimeLimit|n0",
            "partial",
            "exit code 0; Slurm says TIMEOUT (TimeLimit): its time limit was over",
        ),
    ],
)
def test_a_run_whose_job_has_not_concluded_it(
    tmp_path: Path, squeue: Squeue, account: list[str], answer: str, status: str, why: str
) -> None:
    asked = squeue(answer, 0)
    run = submitted(tmp_path / "run")
    if account:
        say(run, "7", *account)
    found = standing(run)
    assert found.status == status
    assert found.why.startswith(why)
    assert len(asked.read_text().splitlines()) == 1


def test_a_script_that_fails_before_ringtap_begins_is_told_from_a_job_that_never_began(
    tmp_path: Path, squeue: Squeue, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue("7|FAILED|NonZeroExitCode|n0", 0)
    run = submitted(tmp_path / "run")
    failed = "Slurm says FAILED (NonZeroExitCode): it failed"
    assert standing(run).why == f"{failed}; it never began"
    assert lines(standing(run))[-1] == "There is nothing to analyze. Next: submit the job again"
    output = SubmitPaths(run.path).output("7")
    output.write_text("no such module\n")
    assert standing(run).why == f"{failed}; its script ended before ringtap began: see submit/slurm-7.out"
    assert lines(standing(run))[-1] == f"There is nothing to analyze. Next: see {output}, then submit the job again"
    monkeypatch.setenv("PATH", "/nowhere")
    assert standing(run).why == "by its files its script began, but not ringtap"


def test_a_start_before_the_last_one_is_not_said_to_run(tmp_path: Path, squeue: Squeue) -> None:
    """The job runs, but what runs is recorded elsewhere."""
    asked = squeue("7|RUNNING|None|n0", 0)
    run = submitted(tmp_path / "run")
    node(run, "n0", "running", done=False)
    run.info["next_start"] = "run-restart1"
    run.finish("partial", "Slurm started the job again: run-restart1 has its next start")
    found = standing(run)
    assert (found.status, found.why) == ("partial", run.info["why"])
    assert not asked.exists()


@pytest.mark.parametrize("is_collected", [False, True])
def test_a_job_without_an_end_of_its_own_is_slurms_before_and_after_collecting(
    tmp_path: Path, squeue: Squeue, is_collected: bool
) -> None:
    squeue("7|NODE_FAIL|NodeDown|n0", 0)
    run = submitted(tmp_path / "run")
    node(run, "n0", "running", done=False)
    say(run, "7", "100 begun on n0")
    if is_collected:
        assert main(["merge", str(run.path)]) == 0
    found = standing(RunDirectory.open(run.path))
    job = "Slurm says NODE_FAIL (NodeDown): a node of it failed; it has not said how it ended"
    assert (found.status, found.why) == ("partial", f"{job}; the recording of n0 was cut off")
    assert [(one.state, one.why) for one in found.jobs] == [("ended", job)]


EXCEEDED = "slurmstepd-n0: error: Exceeded job memory limit\n"


@pytest.mark.parametrize(
    ("output", "stopped", "answer", "why"),
    [
        (
            "slurmstepd-n0: error: StepId=7.1 exceeded memory limit (993669120 > 629145600), being killed\n" + EXCEEDED,
            [],
            "7|FAILED|NonZeroExitCode|n0",
            "; Slurm's daemon says: StepId=7.1 exceeded memory limit (993669120 > 629145600), being killed",
        ),
        (
            "slurmstepd: error: 1 oom_kill event\n",
            [],
            "7|OUT_OF_MEMORY|None|n0",
            "; Slurm says OUT_OF_MEMORY: it used more memory than it may; Slurm's daemon says: 1 oom_kill event",
        ),
        (EXCEEDED, [], "7|FAILED|None|n0", "; Slurm's daemon says: Exceeded job memory limit"),
        ("a job that speaks of oom_kill\n", [], "7|FAILED|None|n0", "; out of memory is one possible cause"),
        ("", ["150 stopped TERM"], "7|FAILED|None|n0", ""),
    ],
)
def test_the_cause_of_a_killed_job_is_its_memory_only_with_evidence(
    tmp_path: Path, squeue: Squeue, output: str, stopped: list[str], answer: str, why: str
) -> None:
    squeue(answer, 0)
    run = submitted(tmp_path / "run")
    say(run, "7", "100 begun on n0", *stopped, "160 ended 137")
    SubmitPaths(run.path).output("7").write_text(output)
    end = "exit code 137 after TERM" if stopped else "exit code 137 (128 + SIGKILL)"
    assert standing(run).jobs[0].why == f"{end}{why}; see submit/slurm-7.out"


def test_a_job_whose_command_was_not_found_is_not_to_be_analyzed(tmp_path: Path, squeue: Squeue) -> None:
    squeue("7|FAILED|NonZeroExitCode|n0", 0)
    run = submitted(tmp_path / "run")
    node(run, "n0", "complete")
    say(run, "7", "100 begun on n0", "160 ended 127")
    output = SubmitPaths(run.path).output("7")
    output.write_text("command not found: made by the job\nbash: nosuch: command not found\nsrun: error\n")
    run.finish("failed", "the job ended with exit code 127")
    assert lines(standing(run))[1:] == [
        "  job 7: ended: exit code 127; its output says: bash: nosuch: command not found; see submit/slurm-7.out",
        "  nodes: 1 complete",
        f"There is nothing to analyze. Next: see {output}, then submit the job again",
    ]


def test_without_slurm_it_is_said_what_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    run = submitted(tmp_path / "run")
    found = standing(run)
    assert (found.status, found.why) == ("unknown", "by its files it has not begun")
    assert "cannot be asked" in found.not_asked
    say(run, "7", "100 begun on n0")
    assert standing(run).why.startswith("by its files it began at ")
    assert standing(run).why.endswith(" on n0; they say nothing of its end")


def test_nodes_that_were_cut_off_are_named_and_their_reason_asked_for(tmp_path: Path, squeue: Squeue) -> None:
    asked = squeue("7|NODE_FAIL|NodeDown|n[0-2]", 0)
    run = submitted(tmp_path / "run")
    node(run, "n0", "complete")
    node(run, "n1", "running", done=False)
    node(run, "n2", "partial", "the disk is full")
    (run.node("n1") / "nic").mkdir()
    (run.node("n1") / "nic" / "nic.rec").touch()
    say(run, "7", "100 begun on n0", "150 stopped TERM", "160 ended 143")
    run.finish("partial", "cancelled")
    found = standing(run)
    assert found.status == "partial"
    assert found.why == (
        "cancelled; exit code 143 after TERM; Slurm says NODE_FAIL (NodeDown): a node of it failed; "
        "the recording of n1 was cut off"
    )
    assert [(one.node, one.status, one.why) for one in found.nodes] == [
        ("n0", "complete", ""),
        ("n1", "cut off", ""),
        ("n2", "partial", "the disk is full"),
    ]
    assert found.nodes[1].written_s
    assert len(asked.read_text().splitlines()) == 1


def test_of_many_nodes_only_the_odd_ones_are_shown(
    tmp_path: Path, squeue: Squeue, capsys: pytest.CaptureFixture[str]
) -> None:
    squeue("7|NODE_FAIL|NodeDown|", 0)
    run = submitted(tmp_path / "run")
    for number in range(60):
        node(run, f"n{number:02d}", "complete", done=number >= 20)
    run.finish("partial", "x")
    assert main(["status", str(run.path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "  nodes: 20 cut off, 40 complete" in shown
    assert "    and 4 more (--json lists all)" in shown
    assert len(shown) < 25


def test_the_reason_of_an_only_series_is_told_once() -> None:
    series = [SeriesStanding(index, name, "stopped", "S1 is full", 1, (0.3,), "") for index, name in enumerate("ab")]
    one = Standing("run", "sweep", "partial", "S1 is full", (), series=tuple(series[:1]))
    assert lines(one)[:2] == ["run: partial: S1 is full", "    0 a  1 of 2 points, stopped"]
    both = Standing("run", "sweep", "partial", "S1 is full", (), series=tuple(series))
    assert lines(both)[2] == "    1 b  1 of 2 points, stopped: S1 is full"


def sweep(tmp_path: Path, loads: list[float]) -> RunDirectory:
    plan = {"models": [{"name": "a"}, {"name": "b"}], "traffic": ["iperf"], "loads": loads}
    return submitted(tmp_path / "run", "sweep", plan=plan)


def measured(run: RunDirectory, index: int, series: str, steps: int, status: str, why: str = "") -> Path:
    """A part with its first points measured."""
    part = SubmitPaths(run.path).parts / f"{index:03d}-{series}"
    part.mkdir(parents=True)
    write_json(part / "run.json", {"schema": 1, "kind": "sweep", "status": status, "why": why})
    item = {"series": series, "model": series[0], "traffic": "iperf", "directory": f"series/{series}-1"}
    item |= {"requested_bps": 0, "window_start_ns": 1, "window_end_ns": 2}
    lines = [json.dumps(item | {"step": step}) + "\n" for step in range(steps)]
    (part / "points.jsonl").write_text("".join(lines))
    return part


def by_series(found: Standing) -> list[tuple[str, str, int, tuple[float, ...]]]:
    return [(one.status, one.why, one.points, one.missing) for one in found.series]


def test_series_of_a_sweep(tmp_path: Path, squeue: Squeue) -> None:
    run = sweep(tmp_path, [0, 0.3, 0.6])
    squeue("7_0|RUNNING|None|n[0-2]\n7_1|PENDING|JobArrayTaskLimit|", 0)
    part = measured(run, 0, "a-iperf", 1, "running")
    # torn, as by a task that is writing now
    with (part / "points.jsonl").open("a") as file:
        file.write('{"step": 1, "dire')
    found = standing(run)
    assert (found.status, found.why) == ("running", "1 of 6 points")
    assert by_series(found) == [
        ("running", "Slurm says RUNNING: it runs on n[0-2]", 1, (0.3, 0.6)),
        ("waiting", "Slurm says PENDING (JobArrayTaskLimit): it waits to start", 0, (0, 0.3, 0.6)),
    ]


def test_series_without_a_job_are_stopped_with_the_reason(tmp_path: Path, squeue: Squeue) -> None:
    run = sweep(tmp_path, [0, 0.3])
    asked = squeue("7_0|CANCELLED|None|n[0-2]\n7_1|CANCELLED|None|", 0)
    measured(run, 0, "a-iperf", 1, "partial", "host S1 was lost")
    found = standing(run)
    assert found.status == "partial"
    assert by_series(found) == [
        ("stopped", "host S1 was lost", 1, (0.3,)),
        ("stopped", "Slurm says CANCELLED: it was cancelled; it never began", 0, (0, 0.3)),
    ]
    # one that was submitted again counts by its last job
    request = json.loads(SubmitPaths(run.path).request.read_text())
    request["jobs"].append({"id": "9"})
    write_json(SubmitPaths(run.path).request, request | {"tasks": [[0, 1], [0]]})
    squeue("7_1|CANCELLED|None|\n9_0|PENDING|Priority|", 0)
    found = standing(run)
    assert [(one.status, one.job) for one in found.series] == [("waiting", "9_0"), ("stopped", "7_1")]
    assert found.status == "waiting"
    assert asked.read_text().splitlines()[-1].count("--jobs=9,7") == 1


def test_a_complete_sweep_asks_nobody(tmp_path: Path, squeue: Squeue) -> None:
    run = sweep(tmp_path, [0])
    asked = squeue("", 0)
    measured(run, 0, "a-iperf", 1, "complete")
    measured(run, 1, "b-iperf", 1, "complete")
    assert standing(run).status == "complete"
    assert not asked.exists()


def test_an_event_that_cannot_be_written_is_said_and_does_not_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    paths = SubmitPaths(tmp_path / "\x1b[2J")
    note(paths, "stopped TERM")
    shown = str(paths.state("7")).replace("\x1b", "\\x1b")
    assert capfd.readouterr().err == f"ringtap: {shown} cannot be written: No such file or directory\n"


def test_a_run_that_was_not_submitted_has_the_status_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    run.node("n0")
    assert (standing(run).status, [node.status for node in standing(run).nodes]) == ("running", ["recording"])
    run.finish("partial", "it was interrupted")
    assert main(["status", str(run.path)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{run.path}: partial: it was interrupted",
        "  nodes: 1 cut off",
    ]
    assert main(["status", str(tmp_path / "none")]) == 2
    assert main(["merge", str(run.path)]) == 2
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["ringtap", "ringtap"]


def test_a_series_whose_loads_are_chosen_is_complete_when_no_load_is_next(tmp_path: Path, squeue: Squeue) -> None:
    run = sweep(tmp_path, [0, 0.3])
    squeue("", 0)
    part = measured(run, 0, "a-iperf", 3, "partial", "the time limit came")
    info = json.loads((part / "run.json").read_text())
    for load, missing in ((0.45, (0.45,)), (None, ())):
        write_json(part / "run.json", info | {"chosen_loads": {"a-iperf": {"load": load, "known": "", "stop": ""}}})
        assert by_series(standing(run))[0][2:] == (3, missing)
