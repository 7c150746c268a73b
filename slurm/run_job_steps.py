"""Runs a submitted job within its batch script: starts its steps, forwards stop signals, and records its end.

The last line of the script runs it: ``exec python -m ringtap.slurm.run_job_steps RUN OPTIONS -- COMMAND`` for a
command, or with RUN alone for a task of an array, which measures one series of a submitted sweep. ``exec`` makes it the
process to which Slurm sends SIGUSR1 ahead of the time limit. It always ends with the exit code of the job.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringtap.agents.hosts.slurm_nodes import allocated_nodes
from ringtap.agents.job.environment import of_this_start
from ringtap.agents.job.exit_cause import KILLED, POSSIBLE_CAUSE, SHELL_CAUSE, MemoryKills
from ringtap.agents.job.foreground_command import GroupWatch
from ringtap.agents.node.node_json import conclude, node_items
from ringtap.core.errors import MeasurementError, UsageError, failure_message
from ringtap.core.isolated_python import python_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.core.run_directory_schema import RUN_JSON
from ringtap.core.terminal_escaping import as_command
from ringtap.core.units import counted
from ringtap.slurm.exit_cause_in_output import killed_or_not_run
from ringtap.slurm.job_state_file import job_id, note, signal_step, variable
from ringtap.slurm.read_array_parts import part_paths
from ringtap.slurm.submission_file_names import SubmitPaths
from ringtap.slurm.submission_request import Recording
from ringtap.slurm.submit_command import add_recording

_ANSWER_S = 30.0  # wait for the next recorder's answer; the job then begins without it
_FINISH_S = 60.0  # for the recorders to finish after the job
_RETRY_S = 0.2
_RINGTAP = python_command(sys.executable, "ringtap.cli")
_CAUSES = {
    "": "",
    "USR1": "it was stopped ahead of the time limit",
    "TERM": "it was cancelled or preempted, its time was over, or a node failed",
}


class Stops:
    """Signals of Slurm that stop the job: SIGUSR1 ahead of the time limit, SIGTERM from scancel and the limit itself.

    SIGTERM reaches every task of a step without this process, SIGUSR1 reaches this process alone. SIGTERM also reaches
    the processes below this one, but not if Slurm tracks processes by control groups (proctrack/cgroup).

    Args:
        paths: file names of the run.

    Attributes:
        cause: the signal that has arrived, ``USR1`` or ``TERM``; empty if none has.
    """

    def __init__(self, paths: SubmitPaths) -> None:
        self.cause = ""
        self._paths = paths
        self._stop_job: Callable[[], None] | None = None
        self._is_due = False
        signal.signal(signal.SIGUSR1, lambda *_: self._near_limit())
        signal.signal(signal.SIGTERM, lambda *_: self._record("TERM"))

    def on_limit(self, stop_job: Callable[[], None]) -> None:
        """Set the function that stops the job ahead of the time limit; call it now if the signal has arrived."""
        self._stop_job = stop_job
        if self._is_due:
            stop_job()

    def on_cancel(self, stop_job: Callable[[], None]) -> None:
        """Set the function that stops the job if SIGTERM reaches this process alone."""
        watch = GroupWatch()

        def cancel() -> None:
            self._record("TERM")
            if not watch.reached_group(signal.SIGTERM):
                stop_job()

        signal.signal(signal.SIGTERM, lambda *_: cancel())

    def _near_limit(self) -> None:
        self._record("USR1")
        if self._stop_job:
            self._stop_job()
        else:
            self._is_due = True

    def _record(self, name: str) -> None:
        if name == "USR1" or not self.cause:
            self.cause = name
        note(self._paths, f"stopped {name}")


def _after(seconds: float, act: Callable[[], object]) -> None:
    """Call a function after a delay; this replaces an earlier call that is still due."""
    signal.signal(signal.SIGALRM, lambda *_: act())
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _stop_step(paths: SubmitPaths, step: str, srun: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGTERM to the tasks of a step that has not ended, and SIGKILL after the grace time."""
    if srun.poll() is not None:
        return
    if signal_step(paths, step, "TERM"):
        _after(grace_s, lambda: signal_step(paths, step, "KILL"))
    else:  # its first task has not begun yet
        _after(_RETRY_S, lambda: _stop_step(paths, step, srun, grace_s))


def run_command(paths: SubmitPaths, options: argparse.Namespace, command: Sequence[str], stops: Stops) -> int:
    """Run the recorders of all nodes and the job itself, each as a step; return the job's exit code.

    Args:
        paths: file names of the run; this node becomes the reference of its clocks.
        options: options of the command line.
        command: command of each task of the job.
        stops: signals that stop the job.
    """
    run = RunDirectory.open(paths.run)
    run.info |= {"status": "running", "why": "", "reference": os.uname().nodename}
    try:
        run.save()
    except OSError as error:
        print(f"ringtap: {run.path / 'run.json'} cannot be written: {error.strerror}; the job goes on", file=sys.stderr)
    nodes = int(variable("SLURM_JOB_NUM_NODES"))
    recording = [*Recording.of(options).words(), "--"]
    environment = os.environ | {
        "MASTER_ADDR": allocated_nodes()[0],
        # differs between jobs; the next port is left free for Horovod
        "MASTER_PORT": str(10000 + int(variable("SLURM_JOB_ID")) % 10000 * 2),
    }

    def step(
        role: str, sruns: Sequence[str], arguments: Sequence[str], stdout: int | None = None
    ) -> subprocess.Popen[bytes]:
        task = python_command(
            sys.executable, "ringtap.slurm.srun_task_main", role, str(paths.run), *recording, *arguments
        )
        srun = ["srun", "--overlap", "--export=ALL", *sruns, *task]
        try:
            return subprocess.Popen(srun, env=environment, stdin=subprocess.DEVNULL, stdout=stdout)
        except OSError as error:
            raise MeasurementError(f"srun cannot be started for the {role}s: {error.strerror}") from error

    # the recorders begin first; otherwise the job's own step would record
    per_node = ["--cpu-bind=none", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    agents = step("recorder", per_node, options.keep, subprocess.PIPE)
    note(paths, f"recording {_count_recorded(agents, nodes)} of {nodes} nodes")
    cores = os.environ.get("SLURM_CPUS_PER_TASK")  # srun does not take this number from the batch script
    launcher = python_command(sys.executable, "ringtap.examples.horovod_rank") if options.horovod else []
    sruns = ["--kill-on-bad-exit=1", *([f"--cpus-per-task={cores}"] if cores else [])]
    kills = MemoryKills()
    job = step("rank", sruns, [*launcher, *command])
    stops.on_limit(lambda: _stop_step(paths, "job", job, options.grace))
    code = _wait(job)
    _stop_step(paths, "agents", agents, _FINISH_S)
    _wait(agents)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return _end(paths, code, stops.cause, kills)


def _count_recorded(agents: subprocess.Popen[bytes], nodes: int) -> int:
    """Return the number of nodes whose recorders answer in time that they record."""
    assert agents.stdout is not None
    answers = b""
    while answers.count(b"\n") < nodes and select.select([agents.stdout], [], [], _ANSWER_S)[0]:
        answer = os.read(agents.stdout.fileno(), 4096)
        if not answer:
            break
        answers += answer
    return answers.split().count(b"yes")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process, whatever signals arrive; return its exit code as a shell does."""
    code = process.wait()
    return code if code >= 0 else 128 - code


def _end(paths: SubmitPaths, code: int, cause: str, kills: MemoryKills) -> int:
    """Record that the job has ended; return its exit code.

    If a rank fails, Slurm ends the others, and srun returns the greatest exit code. The job's exit code is that of the
    rank that failed first, if the nodes recorded it.

    Args:
        paths: file names of the run.
        code: srun's exit code.
        cause: signal that stopped the job, as in `Stops`.
        kills: the processes that the kernel killed on this node since the job began.
    """
    first = code
    try:
        run = RunDirectory.open(paths.run)
        nodes = node_items(run)
        ends = [entry for node in nodes.values() for entry in node.get("jobs") or ()]
        failures = [entry for entry in ends if entry.get("exit_code")]
        earliest: dict[str, Any] = min(failures, key=lambda entry: int(entry.get("ended_ns") or 0), default={})
        if code and failures:
            first = earliest["exit_code"]
        why = str(earliest.get("cause") or "")
        if why in ("", POSSIBLE_CAUSE, SHELL_CAUSE):
            why = (kills.words() if first == KILLED else "") or killed_or_not_run(paths, job_id(), first)
        expected = int(variable("SLURM_JOB_NUM_NODES"))
        missing = (
            f"{expected - len(nodes)} of {counted(expected, 'node')} not recorded" if len(nodes) < expected else ""
        )
        reasons = "; ".join(filter(None, [_CAUSES[cause], missing]))
        conclude(run, first, signal.SIGTERM if cause else None, reasons, why)
    except Exception as error:  # such as a damaged file, which must not change the exit code
        print(f"ringtap: the end of the job is not recorded ({failure_message(error)})", file=sys.stderr)
    return first


def run_series(paths: SubmitPaths, stops: Stops) -> int:
    """Measure one series of a submitted sweep with ``ringtap sweep --resume``; return its exit code.

    Near the time limit the sweep gets SIGTERM: it keeps its points, and a later job resumes it.

    Raises:
        UsageError: the plan has no such series.
    """
    index = variable("SLURM_ARRAY_TASK_ID")
    series = part_paths(RunDirectory.open(paths.run))
    if not index.isdigit() or int(index) >= len(series):
        raise UsageError(f"the plan of {paths.run} has no series {index}")
    name, part = series[int(index)]
    command = [*_RINGTAP, "sweep", str(paths.plan), "-o", str(part), "--series", name, "--resume"]
    sweep = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
    )
    stops.on_cancel(sweep.terminate)
    stops.on_limit(sweep.terminate)
    return _wait(sweep)


def main() -> int:
    """Run the job; return its exit code."""
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    command = arguments[cut + 1 :]
    parser = argparse.ArgumentParser(prog="python -m ringtap.slurm.run_job_steps", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    if command:
        add_recording(parser)
        parser.add_argument(
            "--grace", type=float, required=True, metavar="SECONDS", help="from SIGTERM to SIGKILL near the time limit"
        )
    options = parser.parse_args(arguments[:cut])
    # a series of a sweep goes on where the job's last start ended; a command begins anew
    paths = SubmitPaths(of_this_start(options.run, os.environ) if command else options.run)
    job = job_id()
    stops = Stops(paths)
    if command and not (paths.run / RUN_JSON).is_file():
        _make_run(paths, options, job)
    for step in ("agents", "job"):  # left by the job before Slurm requeued it
        with contextlib.suppress(OSError):
            paths.step(job, step).unlink()
    note(paths, f"begun on {os.uname().nodename}")
    code = as_command(lambda: run_command(paths, options, command, stops) if command else run_series(paths, stops))
    note(paths, f"ended {code}")
    if not command:  # merge what the tasks have measured so far into one run directory
        subprocess.run([*_RINGTAP, "merge", str(paths.run)], stdout=subprocess.DEVNULL, check=False)
    return code


def _make_run(paths: SubmitPaths, options: argparse.Namespace, job: str) -> None:
    """Create the run directory of a script that was submitted by hand, or that Slurm started again."""
    settings = Recording.of(options).settings().to_json()
    RunDirectory.create(paths.run, "job", sys.argv, 0, settings=settings, reference="")
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [{"id": job}]})
    if paths.run != options.run:
        _end_former_start(options.run, paths.run)


def _end_former_start(first: Path, run: Path) -> None:
    """Name the run of this start of the job in that of its start before, and give it the same mode.

    Args:
        first: the run of the job's first start.
        run: the run of this start.
    """
    with contextlib.suppress(OSError, UsageError, ValueError):
        number = int(os.environ["SLURM_RESTART_COUNT"]) - 1
        former = RunDirectory.open(of_this_start(first, {"SLURM_RESTART_COUNT": str(number)}))
        run.chmod(former.path.stat().st_mode & 0o777)
        if former.info.get("status") != "complete":
            former.info["next_start"] = run.name
            former.finish("partial", f"Slurm started the job again: {run.name} has its next start")


if __name__ == "__main__":
    sys.exit(as_command(main))
