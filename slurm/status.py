"""Implements ``ringtap status``: shows the status of a run, from its files and one query to Slurm's controller."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ringtap.agents.job.exit_cause import CANNOT_RUN
from ringtap.agents.node.node_json import node_items
from ringtap.agents.sweep.sweep_lock import LOCK_FILE
from ringtap.core.append_only_logs import read_json_lines
from ringtap.core.command_options import add_json
from ringtap.core.errors import MeasurementError, UsageError, exit_words
from ringtap.core.json_validation import COUNT, Shape, Text
from ringtap.core.run_directory import RunDirectory, Status, read_json, read_points
from ringtap.core.run_directory_schema import POINTS_JSONL, SHARED, SHARED_JSONL
from ringtap.core.terminal_escaping import one_line, shell_word
from ringtap.core.units import counted
from ringtap.core.untrusted_files import open_regular
from ringtap.slurm.exit_cause_in_output import killed_or_not_run
from ringtap.slurm.job_state_file import JobReport, read_report
from ringtap.slurm.query_job_states import ENDED, FORGOTTEN, RUNNING, UNKNOWN, WAITING, SlurmJobState, ask_slurm
from ringtap.slurm.read_array_parts import Part, missing_loads, planned_series, read_parts, whole_plan
from ringtap.slurm.submission_file_names import SubmitPaths

NOT_BEGUN = "submitted; the job has not begun"
FINAL: tuple[Status, ...] = ("complete", "partial", "failed")
_REQUEST: Shape = {"jobs?": [{"id": Text(r"\w[\w.+-]{0,63}", "a job's id")}], "tasks?": [[COUNT]]}


@dataclass(frozen=True)
class JobStanding:
    """Job of a submission.

    Attributes:
        job: id of the job; for a task of an array ``<array's id>_<index>``.
        state: ``waiting``, ``running`` or ``ended``; ``unknown`` if Slurm could not be asked.
        why: reason for the state, or details.
        begun_s: time of its start (seconds since 1970); None if it has not begun.
        exit_code: exit code in its state file; None if there is none.
    """

    job: str
    state: str
    why: str
    begun_s: int | None
    exit_code: int | None


@dataclass(frozen=True)
class NodeStanding:
    """Node of a wrapped command's run.

    Attributes:
        node: name of the node.
        status: ``recording``, ``complete``, ``partial``, or ``cut off``: ended before it wrote its status.
        why: reason for ``partial``; otherwise empty.
        written_s: time of its last write (seconds since 1970); None if it never wrote.
    """

    node: str
    status: str
    why: str
    written_s: int | None


@dataclass(frozen=True)
class SeriesStanding:
    """Series of a sweep.

    Attributes:
        index: index of the series in the plan and in the job array.
        series: name of the series.
        status: ``complete``, ``waiting``, ``running``, ``unknown`` or ``stopped``, which means that points are missing
            and no job will measure them.
        why: reason for the status, or details.
        points: number of points measured.
        missing: loads of the plan without a point, as shares of the capacity.
        job: id of its last job.
    """

    index: int
    series: str
    status: str
    why: str
    points: int
    missing: tuple[float, ...]
    job: str


@dataclass(frozen=True)
class Standing:
    """Status of a submitted run or a sweep.

    Attributes:
        run: the run directory.
        kind: ``job`` or ``sweep``.
        status: ``waiting``, ``running``, ``complete``, ``partial`` or ``failed``; ``unknown`` if its files do not say
            that its jobs have ended and Slurm could not be asked.
        why: reason for the status, or details.
        jobs: jobs of the run.
        nodes: nodes of a wrapped command's run.
        series: series of a sweep.
        not_asked: reason that Slurm could not be asked; empty if it was asked, or if the files say how the run ended.
        plan: plan of a sweep, quoted for a shell.
    """

    run: str
    kind: str
    status: str
    why: str
    jobs: tuple[JobStanding, ...]
    nodes: tuple[NodeStanding, ...] = ()
    series: tuple[SeriesStanding, ...] = ()
    not_asked: str = ""
    plan: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the status as plain data."""
        return asdict(self)


def standing(run: RunDirectory) -> Standing:
    """Return the status of a run; Slurm is asked about a submitted one, but not about complete series.

    Raises:
        UsageError: its files are damaged.
    """
    if not SubmitPaths(run.path).request.is_file():
        is_sweep = run.info.get("kind") == "sweep"
        return replace(_own_standing(run), plan=run.plan_word) if is_sweep else _recorded_standing(run)
    if run.info.get("kind") == "sweep":
        return replace(sweep_standing(run, read_parts(run)), plan=run.plan_word)
    return _command_standing(run)


def _recorded_standing(run: RunDirectory) -> Standing:
    """Return the status of a run that ``ringtap run`` or ``ringtap record`` records, by its files."""
    status = str(run.info.get("status"))
    nodes = tuple(_node_standings(run, alive=status == "running"))
    return Standing(str(run.path), "job", status, str(run.info.get("why") or ""), (), nodes)


def _own_standing(run: RunDirectory) -> Standing:
    """Return the status of a sweep that ``ringtap sweep`` measures on a testbed or on hosts."""
    plan, status, why = whole_plan(run), str(run.info.get("status")), str(run.info.get("why") or "")
    if status == "running" and is_abandoned(run.path):
        status, why = "partial", "it was ended before it could say so"
    points = read_points(run.path / POINTS_JSONL)[0]
    series = []
    for index, name in enumerate(planned_series(plan)):
        done = {point.get("step") for point in points if point["series"] == name}
        missing = missing_loads(plan, run.info, name, done)
        series.append(
            SeriesStanding(index, name, *_own_series(run, name, bool(missing), status), len(done), missing, "")
        )
    count = sum(item.points for item in series)
    if status == "complete" and any(item.missing for item in series):
        status, why = "partial", "the last sweep into it was of one series alone"
    total = count + sum(len(item.missing) for item in series)
    if plan.get("jobs"):
        count = len(read_json_lines(run.path / SHARED_JSONL, SHARED)[0])
        total = len(plan["jobs"]) + len(plan.get("offsets") or [])
    progress = f"{count} of {counted(total, 'point')}"
    return Standing(str(run.path), "sweep", status, "; ".join(filter(None, [progress, why])), (), (), tuple(series))


def _own_series(run: RunDirectory, name: str, is_open: bool, status: str) -> tuple[str, str]:
    """Return the status of a series, and the reason given by its last attempt."""
    if not is_open:
        return "complete", ""
    found = (run.path / "series").glob(f"{glob.escape(name)}-[0-9]*/run.json")
    attempts = {
        int(number): path.parent for path in found if (number := path.parent.name.rpartition("-")[2]).isdecimal()
    }
    info = RunDirectory.open(attempts[max(attempts)]).info if attempts else {}
    if status == "running":
        return ("running" if info.get("status") == "running" else "waiting"), ""
    return "stopped", str(info.get("why") or "")


def is_abandoned(run: Path) -> bool:
    """Return True if the sweep of a run directory was killed: no process holds its lock file."""
    try:
        with open_regular(run / LOCK_FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # the lock is held, or there is none
        return False
    return True


def read_request(paths: SubmitPaths) -> dict[str, Any]:
    """Read submit/request.json: the request, ``jobs`` with the id of each submission, and ``tasks`` with its series.

    Raises:
        UsageError: the file is damaged.
    """
    item: dict[str, Any] = read_json(paths.request, _REQUEST)
    if "tasks" in item and len(item["tasks"]) != len(item.get("jobs") or []):
        raise UsageError(f"{paths.request} cannot be used: it has other tasks than jobs")
    return item


def _submitted(paths: SubmitPaths) -> list[str]:
    """Return the ids of a run's jobs in the order of their submission."""
    return [str(job["id"]) for job in read_request(paths).get("jobs") or []]


def _submitted_tasks(paths: SubmitPaths) -> dict[int, str]:
    """Return the id of the last job submitted for each series of a sweep, by the series' index."""
    tasks = read_request(paths).get("tasks")
    if tasks is None:
        raise UsageError(f"{paths.request} cannot be used: it does not say which series each job measures")
    return {index: f"{job}_{index}" for job, indices in zip(_submitted(paths), tasks, strict=True) for index in indices}


def _job_standings(paths: SubmitPaths, jobs: Sequence[str]) -> tuple[tuple[JobStanding, ...], str]:
    """Return the jobs, and the reason that Slurm could not be asked about them; empty if it was."""
    answers: Mapping[str, SlurmJobState] = {}
    not_asked = ""
    if jobs:
        try:
            answers = ask_slurm(jobs, paths.request.stat().st_uid)
        except MeasurementError as error:
            not_asked = str(error)
    return tuple(_job_standing(paths, read_report(paths, job), answers.get(job)) for job in jobs), not_asked


def _job_standing(paths: SubmitPaths, report: JobReport, answer: SlurmJobState | None) -> JobStanding:
    """Combine a job's report with Slurm's answer, which has priority, as a requeued job has already reported an end."""
    state = answer.kind if answer else UNKNOWN if report.exit_code is None else ENDED
    end = "" if report.exit_code is None else exit_words(report.exit_code)
    if report.stopped and end:
        end = f"exit code {report.exit_code} after {report.stopped}"
    output = paths.output(report.job)
    shown = f"see {output.relative_to(paths.run)}" if output.is_file() else ""
    said = [answer.sentence()] if answer else []
    if end and state == ENDED:
        expected = ("COMPLETED" if report.exit_code == 0 else "FAILED", FORGOTTEN)
        said = [end if answer else f"{end} by its files", *(said if answer and answer.state not in expected else [])]
        said += [killed_or_not_run(paths, report.job, report.exit_code or 0)] if not report.stopped else []
        said += [shown] if report.exit_code else []
    elif end and state == WAITING:
        said.append(f"its last run ended: {end}")
    elif state == ENDED and report.begun_s:
        said.append("it has not said how it ended")
    elif state == ENDED and shown:  # modules or the Python environment failed
        said.append(f"its script ended before ringtap began: {shown}")
    elif state == ENDED:
        said.append("no file says that it began" if answer and answer.state == FORGOTTEN else "it never began")
    elif answer is None and report.begun_s:
        said.append(f"by its files it began at {clock(report.begun_s)} on {report.node}; they say nothing of its end")
    elif answer is None:
        said.append("by its files its script began, but not ringtap" if shown else "by its files it has not begun")
    return JobStanding(report.job, state, "; ".join(filter(None, said)), report.begun_s, report.exit_code)


def _command_standing(run: RunDirectory) -> Standing:
    paths, info = SubmitPaths(run.path), run.info
    status, why = str(info.get("status")), str(info.get("why") or "")
    # what runs now is recorded by the job's next start
    jobs, not_asked = ((), "") if info.get("next_start") else _job_standings(paths, _submitted(paths))
    alive = [state for state in (RUNNING, WAITING, UNKNOWN) if any(job.state == state for job in jobs)]
    if alive and (status == "running" or alive[0] != UNKNOWN):
        why = "; ".join(job.why for job in jobs if job.why and job.state == alive[0])
        return Standing(str(run.path), "job", alive[0], why, jobs, tuple(_node_standings(run, True)), (), not_asked)
    nodes = tuple(_node_standings(run, alive=False))
    cut = [node.node for node in nodes if node.status == "cut off"]
    cut_off = f"the recording of {', '.join(cut)} was cut off" if cut else ""
    is_open = (status == "running" or cut_off not in why) and not info.get("next_start")
    if status != "failed" and (status == "running" or any(node.status != "complete" for node in nodes)):
        status = "partial"
    if is_open:
        why = "" if why == NOT_BEGUN else why
        why = "; ".join(filter(None, [why, *(job.why for job in jobs), cut_off]))
    elif not alive:  # the files say how it ended
        not_asked = ""
    return Standing(str(run.path), "job", status, why, jobs, nodes, (), not_asked)


def _node_standings(run: RunDirectory, alive: bool) -> list[NodeStanding]:
    """Return the nodes that have a folder in the run directory."""
    items, found = node_items(run), []
    for folder in sorted((run.path / "nodes").glob("*/")):
        item = items.get(folder.name, {})
        status = str(item.get("status", "running")) if (folder / "DONE").exists() else "cut off"
        if status == "cut off" and alive:
            status = "recording"
        why = str(item.get("why") or "") if status == "partial" else ""
        found.append(NodeStanding(folder.name, status, why, _last_written_s(folder)))
    return found


def _last_written_s(folder: Path) -> int | None:
    newest = 0.0
    for path in folder.glob("*/*"):
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return int(newest) or None


def sweep_standing(run: RunDirectory, parts: Sequence[Part]) -> Standing:
    """Return the status of a submitted sweep with these parts."""
    paths = SubmitPaths(run.path)
    last = _submitted_tasks(paths)
    missing = [last[part.index] for part in parts if part.missing and part.index in last]
    jobs, not_asked = _job_standings(paths, missing)
    found = {job.job: job for job in jobs}
    series = tuple(_series_standing(part, found.get(last.get(part.index, "")), last) for part in parts)
    states = [item.status for item in series]
    points = sum(item.points for item in series)
    why = f"{points} of {counted(points + sum(len(item.missing) for item in series), 'point')}"
    alive = [state for state in ("running", "waiting", "unknown") if state in states]
    ended = "complete" if set(states) == {"complete"} else "partial" if points else "failed"
    status = alive[0] if alive else ended
    return Standing(str(run.path), "sweep", status, why, jobs, (), series, not_asked)


def _series_standing(part: Part, job: JobStanding | None, last: Mapping[int, str]) -> SeriesStanding:
    status, why = "complete", ""
    if part.missing and job is None:
        status, why = "stopped", "it was not submitted"
    elif part.missing and job is not None:
        status, why = ("stopped" if job.state == "ended" else job.state), job.why
        if status == "stopped" and part.info.get("status") in ("partial", "failed"):
            why = str(part.info.get("why") or why)
    return SeriesStanding(
        part.index, part.series, status, why, len(part.points), part.missing, last.get(part.index, "")
    )


def clock(seconds: int) -> str:
    """Format a time of day, with the date unless it is today."""
    moment, today = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M:%S" if moment[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", moment)


_SHOWN_NODES = 16


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``status`` verb."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}. Reads its files, and asks Slurm once.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of ringtap submit or ringtap sweep")
    add_json(parser)
    parser.set_defaults(handler=_status)


def _status(options: argparse.Namespace) -> int:
    found = standing(RunDirectory.open(options.run))
    if options.json:
        print(json.dumps(found.to_json()))
        return 0
    for line in lines(found):
        print(one_line(line))
    return 0


def lines(found: Standing) -> list[str]:
    """Format the status of a run as lines of text."""
    text = [f"{found.run}: {found.status}" + (f": {found.why}" if found.why else "")]
    if found.not_asked:
        text.append(f"  {found.not_asked}")
    if found.kind == "sweep":
        width = max((len(item.series) for item in found.series), default=0)
        above = found.why if len(found.series) == 1 else ""  # contains the reason of the only series
        text += [f"  {item.index:3d} {item.series:<{width}}  {_series(item, above)}" for item in found.series]
    else:
        text += [f"  job {job.job}: {job.state}" + (f": {job.why}" if job.why else "") for job in found.jobs]
        text += _nodes(found)
    return [*text, *next_steps(found)]


def _series(item: SeriesStanding, above: str) -> str:
    text = f"{item.points} of {counted(item.points + len(item.missing), 'point')}, {item.status}"
    if item.job and item.status in ("waiting", "running", "unknown"):
        text += f" as job {item.job}"
    return text + (f": {item.why}" if item.why and item.why not in above else "")


def _nodes(found: Standing) -> list[str]:
    """Format the number of nodes by status, and the names of those that are cut off or partial."""
    count = Counter(node.status for node in found.nodes)
    text = ["  nodes: " + ", ".join(f"{number} {status}" for status, number in count.items())] if count else []
    odd = [node for node in found.nodes if node.status in ("cut off", "partial")]
    for node in odd[:_SHOWN_NODES]:
        last = f"wrote last at {clock(node.written_s)}" if node.written_s else "wrote nothing"
        text.append(f"    {node.node} {node.status}: {node.why or last}")
    if len(odd) > _SHOWN_NODES:
        text.append(f"    and {len(odd) - _SHOWN_NODES} more (--json lists all)")
    return text


def next_steps(found: Standing) -> list[str]:
    """Return sentences about what to do next; none while a job waits or runs."""
    run = shell_word(found.run)
    if found.kind == "job":
        return _next_of_job(found) if found.status in FINAL else []
    if not SubmitPaths(Path(found.run)).request.is_file():  # ringtap sweep measures it, and not a job of Slurm
        if found.status in ("partial", "failed"):
            return [f"To measure what is missing: ringtap sweep {found.plan} -o {run} --resume"]
        return [f"Next: ringtap report {run}"] if found.status == "complete" else []
    again = [f"To measure what is missing: ringtap submit {found.plan} -o {run}"]
    stopped = any(item.status == "stopped" for item in found.series)
    return [*(again if stopped else []), f"Next: ringtap merge {run}"]


def _next_of_job(found: Standing) -> list[str]:
    """Return what to do after the end of a job, which may have left nothing to analyze."""
    paths = SubmitPaths(Path(found.run))
    outputs = [paths.output(job.job) for job in found.jobs if job.exit_code != 0 and paths.output(job.job).is_file()]
    has_begun = found.nodes and all(job.exit_code not in CANNOT_RUN for job in found.jobs)
    if has_begun:
        return [f"Next: ringtap analyze {shell_word(found.run)}"]
    if outputs:
        return [f"There is nothing to analyze. Next: see {shell_word(outputs[-1])}, then submit the job again"]
    return ["There is nothing to analyze. Next: submit the job again"]
