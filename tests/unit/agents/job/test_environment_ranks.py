"""Ranks of one launch share a run and a node's agent; runs at once stay apart; processes may be attached."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringtap.agents.job.environment import local_size, machine, of_this_start, run_key, slurm_tasks
from ringtap.agents.job.run_location import find_location
from ringtap.agents.node import agent_control_socket
from ringtap.agents.node.node_json import conclude
from ringtap.agents.node.recording_settings import RunSettings, parse_settings
from ringtap.collectors.process_facts import rank_in
from ringtap.core import run_directory
from ringtap.core.append_only_logs import RecordWriter
from ringtap.core.errors import UsageError
from ringtap.core.run_completeness import missing_ranks
from ringtap.core.run_directory import RunDirectory, TakenError, UnwritableError, write_json
from tests.unit.agent_processes import (
    PLAIN,
    RINGTAP,
    ROOT,
    agent_of,
    agents_of,
    ended,
    gone,
    node_item,
    python,
    rows_of,
    run_item,
    until_recorded,
    wait_for,
    without_launcher,
    wrapped,
)
from tests.unit.live_run import STEPS

pytestmark = pytest.mark.shares

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}


def slurm_rank(rank: int, job: str = "4711") -> dict[str, str]:
    return without_launcher() | SLURM | {"SLURM_PROCID": str(rank), "SLURM_JOB_ID": job, "PYTHONPATH": str(ROOT)}


def start_rank(folder: Path, rank: int, code: str, *options: str, job: str = "4711") -> "subprocess.Popen[str]":
    arguments = [*RINGTAP, "run", "--node", "here", *PLAIN, *options, "--", *python(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, cwd=folder, env=slurm_rank(rank, job), **pipes)  # type: ignore[call-overload, no-any-return]


def let_end(*processes: "subprocess.Popen[str]") -> None:
    """End jobs that wait for a line."""
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()


def finish(processes: "list[subprocess.Popen[str]]") -> list[tuple[str, str, int]]:
    return [(*process.communicate(timeout=60), process.returncode) for process in processes]


@pytest.mark.parametrize("options", [(), ("-o", "mine")], ids=["by default", "a named folder"])
def test_four_ranks_share_one_run_and_one_agent(tmp_path: Path, options: tuple[str, ...]) -> None:
    code = "import os, sys; sys.stdin.readline(); print(os.environ['RINGTAP_RUN'])"
    run = tmp_path / ("mine" if options else "runs/python-slurm-4711.0")
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(ended(start_rank(tmp_path, rank, code, *options))) for rank in range(4)]
        until_recorded(run, jobs=4)
        let_end(*ranks[:3])
        results = finish(ranks[:3])
        time.sleep(0.8)
        let_end(ranks[3])
        results += finish(ranks[3:])
    assert [code for _, _, code in results] == [0] * 4, results
    assert {output.strip() for output, _, _ in results} == {str(run)}
    assert sum("Wrote" in errors for _, errors, _ in results) == 1
    item = node_item(run)
    assert sorted(job["rank"] for job in item["jobs"]) == [0, 1, 2, 3]
    assert {job["exit_code"] for job in item["jobs"]} == {0}
    assert (item["status"], item["why"]) == ("complete", "")
    assert [folder.name for folder in (run / "nodes").iterdir()] == ["here"]
    rows = rows_of(run)
    assert rows[-1][0] - rows[0][0] > 0.75e9  # to the last rank's end
    assert run_item(run)["key"] == "slurm-4711.0"


def test_a_rank_that_is_over_before_the_others_come(tmp_path: Path) -> None:
    first = start_rank(tmp_path, 0, "pass")
    time.sleep(0.9)
    results = finish([first, start_rank(tmp_path, 1, "pass"), start_rank(tmp_path, 2, "pass")])
    assert [code for _, _, code in results] == [0] * 3, results
    item = node_item(tmp_path / "runs" / "python-slurm-4711.0")
    assert sorted(job["rank"] for job in item["jobs"]) == [0, 1, 2]


def test_a_second_run_of_the_same_step_is_another_run(tmp_path: Path) -> None:
    names = ["python-slurm-4711.0", "python-slurm-4711.0-2"]
    for name in names:
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(ended(start_rank(tmp_path, rank, "input()"))) for rank in range(2)]
            until_recorded(tmp_path / "runs" / name, jobs=2)
            let_end(*ranks)
            results = finish(ranks)
        assert [code for _, _, code in results] == [0, 0], results
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    for path in (tmp_path / "runs").iterdir():
        assert len(node_item(path)["jobs"]) == 2


def test_a_named_folder_is_one_runs_only(tmp_path: Path) -> None:
    assert finish([start_rank(tmp_path, 0, "pass", "-o", "mine")])[0][2] == 0
    again, other = (
        finish([start_rank(tmp_path, 0, "print('ran')", "-o", "mine", job=job)])[0] for job in ("4711", "4712")
    )
    assert (again[0], again[2], other[0], other[2]) == ("", 2, "", 2)
    assert "holds a run of this rank already" in again[1]
    assert "belongs to another run" in other[1]
    assert len(node_item(tmp_path / "mine")["jobs"]) == 1


def test_two_runs_at_once_on_a_node_do_not_mix(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two", "three")]
    code = "import os; input(); print(os.environ['RINGTAP_RUN'])"
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(ended(wrapped(run, *python(code), stdin=subprocess.PIPE))) for run in runs]
        agents = {agent_of(run).pid for run in runs}
        assert len(agents) == 3
        let_end(*processes)
        results = finish(processes)
    assert [output.strip() for output, _, _ in results] == [str(run) for run in runs]
    for run in runs:
        assert len(node_item(run)["jobs"]) == 1
        assert node_item(run)["status"] == "complete"


def test_one_rank_killed_does_not_end_the_others_recording(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        options = "-o", str(tmp_path / "run")
        ranks = [stack.enter_context(ended(start_rank(tmp_path, rank, "input()", *options))) for rank in range(3)]
        agent_of(tmp_path / "run", jobs=3)
        jobs = {job["rank"]: job["pid"] for job in node_item(tmp_path / "run")["jobs"]}
        psutil.Process(jobs[1]).kill()
        ranks[2].kill()  # its supervisor
        ranks[1].wait(30)
        time.sleep(0.6)
        let_end(ranks[0], ranks[2])
        results = finish(ranks)
    assert [code for _, _, code in results] == [0, -9, -9]
    gone(tmp_path / "run")
    found = {job["rank"]: job for job in node_item(tmp_path / "run")["jobs"]}
    assert [found[rank]["exit_code"] for rank in range(3)] == [0, 137, None]
    assert found[2]["ended_ns"] - found[1]["ended_ns"] > 5e8
    assert node_item(tmp_path / "run")["status"] == "partial"


def start_on(folder: Path, node: str, code: str, *options: str, **variables: str) -> "subprocess.Popen[str]":
    """The line that is the same on every node, but for the node's name."""
    arguments = [*RINGTAP, "run", "--join", "run", "--node", node, *PLAIN, *options, "--", *python(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = without_launcher() | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(arguments, cwd=folder, env=environment, **pipes)  # type: ignore[call-overload, no-any-return]


def test_the_first_of_several_nodes_makes_the_run_and_the_others_join(tmp_path: Path) -> None:
    nodes = ("S0", "S1", "S2")
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(ended(start_on(tmp_path, node, "input(); print('ran')"))) for node in nodes]
        paths = [tmp_path / "run" / "nodes" / node / "node.json" for node in nodes]
        wait_for(lambda: all(path.exists() and json.loads(path.read_text())["jobs"] for path in paths))
        let_end(*processes)
        results = finish(processes)
    assert [(output, code) for output, _, code in results] == [("ran\n", 0)] * 3, results
    assert sum("recording to run\n" in errors for _, errors, _ in results) == 1
    assert sum("Wrote run." in errors for _, errors, _ in results) == 1
    assert sorted(path.name for path in (tmp_path / "run" / "nodes").iterdir()) == sorted(nodes)
    assert {node_item(tmp_path / "run", node)["status"] for node in nodes} == {"complete"}
    assert run_item(tmp_path / "run")["status"] == "complete"


def test_a_node_that_cannot_join_runs_its_job_all_the_same(tmp_path: Path) -> None:
    """A node that comes late changes nothing that was recorded."""
    run = tmp_path / "run"
    assert finish([start_on(tmp_path, "here", "pass")])[0][2] == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ((output, errors, code),) = finish([start_on(tmp_path, "there", "print('ran')")])
    assert (output, code) == ("ran\n", 0)
    assert errors == (
        f"ringtap: {run} holds a run that has ended: name another folder: the job runs without being recorded\n"
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    arguments = [*RINGTAP, "record", "--join", str(run), "--node", "here", "--duration", "100ms"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, "holds a run that has ended" in done.stderr) == (2, True)


def test_a_job_that_begins_when_its_nodes_recording_has_ended_makes_it_partial(tmp_path: Path) -> None:
    """Only its steps are recorded, so that the node is not complete, although its agent ended in order."""
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    folder = run.node("here")
    write_json(folder / "node.json", {"status": "complete", "why": "", "node": "here", "jobs": []})
    (folder / "DONE").touch()
    for number in (1, 2):
        ((output, errors, code),) = finish([start_on(tmp_path, "here", "print('ran'); raise SystemExit(3)")])
        assert (output, code) == ("ran\n", 3)
        assert "has been recorded already" in errors
        item = node_item(run.path)
        why = "a job began after the recording had ended: at most its steps are here"
        assert (item["status"], item["why"]) == ("partial", why)
        assert [job["exit_code"] for job in item["jobs"]] == [3] * number


@pytest.mark.parametrize("options", [("-o", "mine"), ("--join", "mine")])
def test_each_start_of_a_job_records_into_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = {options[0]: Path(options[1])}
    names = []
    for count, step in (("", ""), ("1", "0"), ("2", "")):
        environment = without_launcher() | {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_RESTART_COUNT": count}
        monkeypatch.setattr(os, "environ", environment | ({"SLURM_STEP_ID": step} if step else {}))
        settings = RunSettings(("nic",), (), 0.1)
        found = find_location("python", folder.get("-o"), folder.get("--join"), "n0", settings)
        assert found.created
        names.append((found.run.path.name, found.run.info["job"]))
        found.run.finish("partial")
    assert names == [("mine", "7"), ("mine-restart1", "7-restart1"), ("mine-restart2", "7-restart2")]
    assert of_this_start(Path("a/mine-restart2"), os.environ) == Path("a/mine-restart2")


def attach(run: Path, node: str, pid: int) -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-m", "ringtap.agents.node.record_unsupervised_process", str(run), node, str(pid)]
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=30)


def test_attached_processes_are_recorded_until_they_end(tmp_path: Path) -> None:
    """As ranks that a launcher starts on a node where no supervisor runs."""
    run = tmp_path / "run"
    settings = {"collectors": ["nic"], "recorders": [], "every_s": 0.01, "options": {}}
    RunDirectory.create(run, "job", [], 0, settings=settings)
    with ended(subprocess.Popen(["sleep", "90"])) as one, ended(subprocess.Popen(["sleep", "90"])) as two:
        began = time.monotonic()
        attaching = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "ringtap.agents.node.record_unsupervised_process",
                    str(run),
                    "there",
                    str(process.pid),
                ]
            )
            for process in (one, two)
        ]
        assert [process.wait(30) for process in attaching] == [0, 0]
        assert time.monotonic() - began < 10
        assert (one.poll(), two.poll()) == (None, None), "it does not wait for their end"
        wait_for((run / "nodes" / "there" / "nic" / "nic.rec").exists)
        wait_for((run / "nodes" / "there" / "node.json").exists)
        item = wait_for(lambda: len((found := node_item(run, "there"))["jobs"]) == 2 and found)
        assert {job["pid"] for job in item["jobs"]} == {one.pid, two.pid}
        assert item["jobs"][0]["command"][0] == "sleep"
    wait_for((run / "nodes" / "there" / "DONE").exists)
    item = node_item(run, "there")
    assert (item["status"], {job["exit_code"] for job in item["jobs"]}) == ("complete", {None})
    wait_for(lambda: not psutil.pid_exists(item["agent"]["pid"]))


def test_attaching_what_is_not_there(tmp_path: Path) -> None:
    done = attach(tmp_path, "here", os.getpid())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    run = tmp_path / "run"
    RunDirectory.create(run, "job", [], 0)
    done = attach(run, "here", 2**22 + 1)
    assert (done.returncode, "there is no process" in done.stderr) == (2, True)
    assert not (run / "nodes").exists()


def test_what_killed_agents_leave_is_tidied_up_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    short = Path(tempfile.mkdtemp())  # a socket's path has at most 107 bytes
    request.addfinalizer(lambda: shutil.rmtree(short))
    monkeypatch.setattr(agent_control_socket, "LOCAL", short)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    old, young, living, own = (
        agent_control_socket.AgentSocket(tmp_path / name, "here") for name in ("a", "b", "c", "d")
    )
    for one in (old, young):
        lock = one.take()
        assert lock is not None
        one.listen().close()
        os.close(lock)
    held = living.take()
    assert held is not None
    folder = agent_control_socket.private_folder()
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    os.utime(young._lock_path)
    own.tidy()
    assert {path.name for path in folder.iterdir()} == {
        *(young._lock_path.name, young._socket_path.name),
        living._lock_path.name,
    }
    os.close(held)


def test_a_capture_watches_processes_until_they_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended(subprocess.Popen(["sleep", "60"])) as watched:
        arguments = [*RINGTAP, "record", "-o", str(run), "--node", "here", *PLAIN, "--pid", str(watched.pid)]
        with ended(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)) as process:
            agent_of(run)
            time.sleep(0.6)
            assert process.poll() is None
            watched.kill()
            watched.wait()
            assert process.wait(20) == 0
    item = node_item(run)
    assert (item["status"], item["jobs"][0]["pid"]) == ("complete", watched.pid)
    assert run_item(run)["status"] == "complete"
    gone(run)


def test_a_capture_that_is_killed_takes_its_agent_with_it(tmp_path: Path) -> None:
    """Though the watched process lives: nobody is left who would end the recording."""
    run = tmp_path / "run"
    with ended(subprocess.Popen(["sleep", "60"])) as watched:
        arguments = [*RINGTAP, "record", "-o", str(run), "--node", "here", *PLAIN, "--pid", str(watched.pid)]
        with ended(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)) as process:
            agent_of(run)
            process.kill()
        gone(run)
        watched.kill()
    assert node_item(run)["why"] == "the capturing command was killed"
    assert run_item(run)["status"] == "partial"


def test_a_capture_whose_agent_is_killed_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # a process to watch, so that the agent's file tells when the command has reached it
    arguments = [*RINGTAP, "record", "-o", str(run), "--node", "here", *PLAIN, "--pid", str(os.getpid())]
    with ended(subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)) as process:
        agent_of(run).kill()
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "the agent was killed or crashed" in errors
    assert run_item(run)["status"] == "partial"
    assert not agents_of(run)
    gone(run)


@pytest.mark.parametrize(
    ("variables", "key", "rank", "size"),
    [
        ({}, "", None, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, "", 0, 1),  # a batch script
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "5", "SLURM_NODEID": "2"}
            | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"},
            "slurm-7.1",
            5,
            3,
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_PROCID": "5", "SLURM_RESTART_COUNT": "2"},
            "slurm-7.1-restart2",
            5,
            1,
        ),
        (
            {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
            | {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"},
            "slurm-7_2.0",
            1,
            1,
        ),
        (
            {"PMIX_NAMESPACE": "prterun-n1-99@1", "PMIX_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
            "mpi-prterun-n1-99@1",
            3,
            8,
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "OMPI_MCA_ess_base_jobid": "33"}
            | {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpi-7-33",
            6,
            2,
        ),
        ({"SLURM_STEP_TASKS_PER_NODE": "what", "SLURM_NODEID": "0"}, "", None, 1),
    ],
)
def test_what_a_launcher_says(variables: dict[str, str], key: str, rank: int | None, size: int) -> None:
    assert (run_key(variables), rank_in(variables), local_size(variables)) == (key, rank, size)


def test_making_or_joining_a_run(tmp_path: Path) -> None:
    first = RunDirectory.create_or_join(tmp_path / "run", [], key="k", rank="0")
    second = RunDirectory.create_or_join(tmp_path / "run", [], key="k", rank="1")
    assert first and second
    assert (first[1], second[1], second[0].info["created_ns"]) == (True, False, first[0].info["created_ns"])
    assert RunDirectory.create_or_join(tmp_path / "run", [], key="k", rank="1") is None
    with pytest.raises(UsageError, match="another run"):
        RunDirectory.create_or_join(tmp_path / "run", [], key="other", rank="0")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "one.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty"):
        RunDirectory.create_or_join(tmp_path / "thesis", [], key="k", rank="0")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["key"] == "k"


def shared(path: Path, key: str = "", rank: str = "0", job: str = "") -> tuple[RunDirectory, bool] | None:
    return RunDirectory.create_or_join(path, [], key=key, rank=rank, job=job, is_named=True)


def test_who_may_join_a_run_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    made = shared(path, "slurm-7.0", job="7")
    assert made and made[1]
    for key, job in (("slurm-7.1", "7"), ("", "7"), ("", "")):  # another step, the batch script, a node over ssh
        joined = shared(path, key, job=job)
        assert joined and not joined[1]
    assert shared(path, "slurm-7.0", job="7") is None  # the same rank of the same step: another run
    with pytest.raises(TakenError, match="belongs to job 7, and this is job 8"):
        shared(path, "slurm-8.0", job="8")
    made[0].finish("complete")
    assert shared(path, "slurm-7.0", rank="1", job="7")  # a rank of the launch that is late
    with pytest.raises(TakenError, match="holds a run that has ended: name another folder"):
        shared(path, "slurm-7.1", job="7")
    RunDirectory.create(tmp_path / "sweep", "sweep", [], 0)
    with pytest.raises(TakenError, match="is a sweep"):
        shared(tmp_path / "sweep")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "one.tex").write_text("years of work")
    with pytest.raises(UsageError, match="is not empty, and no run directory"):
        shared(tmp_path / "thesis")


def test_the_first_node_may_die_before_it_has_written_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / ".run.json.n0.7.00ff00ff").write_text('{"schema"')
    made = shared(path)
    assert made and made[1]


def test_a_file_system_that_is_late_or_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS shows another machine's files late, and repeats a request whose answer was lost."""
    really_link, really_open = os.link, RunDirectory.open

    def link_twice(source: Path, target: Path) -> None:
        really_link(source, target)
        raise FileExistsError

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link_twice)
        made = shared(tmp_path / "run")
    assert made and made[1]
    answers = [UsageError("run.json is missing")] * 3

    def open_late(path: Path) -> RunDirectory:
        if answers:
            raise answers.pop()
        return really_open(path)

    monkeypatch.setattr(RunDirectory, "open", open_late)
    joined = shared(tmp_path / "run")
    assert joined and not joined[1]
    monkeypatch.setattr(run_directory, "_VISIBLE_S", 0.1)
    answers += [UsageError("run.json is missing")] * 100
    with pytest.raises(UnwritableError, match=r"run.json is missing, 0 s after another process made it"):
        shared(tmp_path / "run")


def test_machines_of_one_name_are_nodes_of_their_own(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    names = [run.claim_node("localhost", boot) for boot in ("one", "two", "one", "three", "two")]
    assert names == ["localhost", "localhost-2", "localhost", "localhost-3", "localhost-2"]
    assert machine() == machine() != ""
    (run.path / "nodes" / "n1").write_text("in the way")
    with pytest.raises(UnwritableError, match="cannot be written"):
        run.claim_node("n1", "one")


def step_log(run: RunDirectory, node: str, rank: int, size: int, group: str = "torch") -> None:
    about = {"collector": "steps", "rank": rank, "world_size": size, "group": group}
    RecordWriter(run.node(node) / "steps" / f"rank{rank}-{100 + rank}.rec", STEPS, about).close()


def concluded(run: RunDirectory, code: int = 0) -> tuple[str, str]:
    conclude(run, code, None, "")
    return run_item(run.path)["status"], run_item(run.path)["why"]


def test_a_run_with_half_of_the_ranks_is_not_complete(tmp_path: Path) -> None:
    """As on node-local disks: each half would otherwise call itself whole."""
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    assert concluded(run) == ("complete", "")
    step_log(run, "n0", 0, 4, group="")  # by the launcher's variables alone: it may be no group
    assert concluded(run) == ("complete", "")
    step_log(run, "n0", 1, 4)
    step_log(run, "n1", 3, 4)
    assert concluded(run) == ("partial", "2 of 4 ranks recorded steps here, ranks 0, 2 did not")
    step_log(run, "n1", 2, 4)
    (run.path / "nodes/n0/steps/rank0-100.rec").write_bytes(b"damaged")
    assert concluded(run) == ("partial", "3 of 4 ranks recorded steps here, rank 0 did not")
    step_log(run, "n2", 0, 4)
    assert concluded(run) == ("complete", "")
    assert missing_ranks([(7, 1000)]) == "1 of 1000 ranks recorded steps here, ranks 0, 1, 2, 3, … did not"


@pytest.mark.parametrize(
    ("end", "status", "why"),
    [
        ({"exit_code": 0}, "complete", ""),
        ({"exit_code": None}, "complete", ""),  # not known
        ({"exit_code": 7}, "failed", "rank 3 on n1 ended with exit code 7"),
        ({"exit_code": 137, "signal": "SIGKILL"}, "partial", "rank 3 on n1 was ended by SIGKILL"),
        ({"exit_code": 7, "rank": None}, "failed", "the job on n1 ended with exit code 7"),
    ],
)
def test_a_run_is_not_complete_if_another_rank_failed(
    tmp_path: Path, end: dict[str, Any], status: str, why: str
) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    ends = {"n0": {"rank": 0, "exit_code": 0, "ended_ns": 1}, "n1": {"rank": 3, "ended_ns": 2} | end}
    for node, job in ends.items():
        write_json(run.node(node) / "node.json", {"status": "complete", "jobs": [job], "collectors": {}})
    assert concluded(run) == (status, why)
    assert concluded(run, code=5) == ("failed", "the job ended with exit code 5")


def test_a_collector_that_was_named_and_is_not_there_makes_a_run_partial(tmp_path: Path) -> None:
    entry = {"state": "unavailable", "reason": "no NVIDIA driver", "remedy": ""}
    for collect, expected in (("default", ("complete", "")), ("nic,GPU", ("partial", "gpu: no NVIDIA driver"))):
        settings = parse_settings(collect, "100ms", {})
        assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
        run = RunDirectory.create(tmp_path / collect, "job", [], 0, settings=settings.to_json())
        write_json(run.node("n0") / "node.json", {"status": "complete", "jobs": [], "collectors": {"gpu": entry}})
        assert concluded(run) == expected


def test_tasks_of_nodes() -> None:
    assert slurm_tasks("4") == [4]
    assert slurm_tasks("2(x3),1,16(x2)") == [2, 2, 2, 1, 16, 16]
