"""Submits sweep plans as job arrays: one task per series, each a separate ``ringtap sweep`` that can be resumed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from ringtap.agents.sweep.sweep_estimate import resolved, series_names, sweep_s
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory, new_name
from ringtap.core.run_directory_schema import EVERY, RUN_JSON
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.sweep_plan import SharingPlan, SweepPlan, load_plan
from ringtap.core.terminal_escaping import shell_word
from ringtap.core.units import format_duration
from ringtap.slurm import batch_script
from ringtap.slurm.read_array_parts import read_parts
from ringtap.slurm.site_profiles import Site
from ringtap.slurm.status import NOT_BEGUN, read_request, sweep_standing
from ringtap.slurm.submission_file_names import SubmitPaths
from ringtap.slurm.submission_request import Environment, Resources, describe_resources, parse_time_s
from ringtap.slurm.submit import check_place, find_sbatch, hand_over


class _Request(NamedTuple):
    """Sweep to submit: plan, working folder, resources per task, Python environment and site."""

    plan: SweepPlan
    folder: Path
    resources: Resources
    environment: Environment
    site: Site


def plan_script(request: _Request, paths: SubmitPaths, indices: Sequence[int], after: Sequence[str]) -> str:
    """Return the batch script of a plan.

    Args:
        request: the sweep.
        paths: file names of its run directory.
        indices: indices of the series to measure.
        after: ids of jobs that measure other series and must end first.
    """
    cluster = request.plan.topology
    assert isinstance(cluster, Cluster)
    pinned = [host.node for host in cluster.hosts if host.node]
    directives = [
        # one task at a time, on its own nodes: two would load each other's network
        f"array={','.join(map(str, indices))}%1",
        "exclusive",
        "requeue",
        "open-mode=append",
        *([f"dependency=afterany:{':'.join(after)}"] if after else []),
        *([f"nodelist={','.join(pinned)}"] if pinned else []),
    ]
    return batch_script.batch_script(
        request.resources, request.environment, request.site, request.folder, [paths.run], directives=directives
    )


def submit_plan(
    file: Path, options: argparse.Namespace, site: Site, resources: Resources, environment: Environment
) -> int:
    """Run ``ringtap submit PLAN.toml``: submit a sweep, or the missing series of one that was submitted before.

    Args:
        file: the plan.
        options: options of the command line.
        site: the site.
        resources: checked resources of each task.
        environment: Python environment of each task.

    Raises:
        UsageError: the plan is not for Slurm, an option does not apply to a plan, the run directory belongs to another
            plan, or sbatch refuses.
    """
    plan = load_plan(file)
    cluster = plan.topology
    if not isinstance(cluster, Cluster) or cluster.reach != "slurm":
        raise UsageError(f'{file} is not for Slurm: under [cluster] it needs reach = "slurm"')
    if isinstance(plan, SharingPlan):
        raise UsageError(
            f"{file} has [[jobs]], which are no series for the tasks of an array: run ringtap sweep {shell_word(file)} "
            f"in an allocation of {len(cluster.hosts)} nodes (salloc, or a batch script of yours)"
        )
    _check_options(options, len(cluster.hosts))
    resources = replace(resources, nodes=len(cluster.hosts))
    path: Path = options.output or Path("runs") / new_name(plan.name)
    paths = SubmitPaths(path)
    names = series_names(plan)
    indices, after = _missing_series(plan, paths, names)
    request = _Request(plan, Path.cwd(), resources, environment, site)
    if options.print:
        batch_script.print_script(plan_script(request, paths, indices or range(len(names)), after))
        return 0
    if not indices:
        print(f"Nothing is left to submit. Next: ringtap merge {shell_word(path)}")
        return 0
    warnings = [*check_place(paths.run, site), *_time_warnings(plan, [names[index] for index in indices], resources)]
    for warning in warnings:
        print(f"ringtap: {warning}", file=sys.stderr)
    job = _submit(request, file, paths, indices, after, options.access)
    if options.json:
        series = [names[index] for index in indices]
        print(json.dumps({"job": job, "run": str(paths.run), "series": series, "site": site.name}))
    else:
        print(f"Submitted job {job}: {len(indices)} of {len(names)} series, one after the other")
        print(f"Each gets, on {site.name}: {describe_resources(resources, environment)}")
        print(f"Wrote {path / paths.script.relative_to(paths.run)}. Next: ringtap status {shell_word(path)}")
    return 0


def _check_options(options: argparse.Namespace, hosts: int) -> None:
    """Refuse options whose values come from the plan."""
    if options.nodes not in (1, hosts) or options.tasks_per_node != 1:
        raise UsageError(f"the plan has {hosts} hosts, a node each: leave out --nodes and --tasks-per-node")
    given = {"--collect": options.collect != "default", "--every": options.every != EVERY}
    given |= {"--packets-around-slow": options.packets_around_slow is not None}
    given |= {"--disk-limit": options.disk_limit is not None}
    given |= {"--keep": bool(options.keep), "--horovod": options.horovod}
    for name, is_given in given.items():
        if is_given:
            raise UsageError(f"{name} is for a command; the plan determines what a sweep records")


def _missing_series(plan: SweepPlan, paths: SubmitPaths, names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Return the indices of the series to submit, and the ids of this run's arrays that wait or run.

    For a new run these are all series; for an earlier one, the series that lack points and have no job.

    Raises:
        UsageError: another plan was submitted there, or the state of its jobs is not known.
    """
    if not (paths.run / RUN_JSON).is_file():
        return list(range(len(names))), []
    run = RunDirectory.open(paths.run)
    parts = read_parts(run)
    before, now = run.info["plan"], resolved(plan)
    differing = [key for key in now if now[key] != before.get(key)]
    if differing:
        raise UsageError(
            f"{paths.run} was submitted with another plan (different: {', '.join(differing)}): use a new folder"
        )
    status = sweep_standing(run, parts)
    if status.not_asked:
        raise UsageError(f"jobs of {paths.run} may still wait or run, and {status.not_asked}")
    alive = [series.job.partition("_")[0] for series in status.series if series.status in ("waiting", "running")]
    return [series.index for series in status.series if series.status == "stopped"], list(dict.fromkeys(alive))


def _time_warnings(plan: SweepPlan, names: Sequence[str], resources: Resources) -> list[str]:
    """Return one sentence: how long the longest series takes, and whether the time limit stops it."""
    expected_s = max(sweep_s(plan, name) for name in names)
    text = f"a series takes about {format_duration(expected_s)}"
    limit_s = parse_time_s(resources.time) - resources.stop_before_s if resources.time else expected_s
    if limit_s < expected_s:
        return [f"{text}, and its job is stopped after {format_duration(limit_s)}: submit again to continue"]
    return [text]


def _submit(
    request: _Request, file: Path, paths: SubmitPaths, indices: Sequence[int], after: Sequence[str], access: str
) -> str:
    """Create the run directory, or use the existing one, and submit the array; return its id."""
    sbatch = find_sbatch()
    plan, text = request.plan, plan_script(request, paths, indices, after)
    about = {"site": request.site.name, "folder": str(request.folder), "resources": asdict(request.resources)}
    if (paths.run / RUN_JSON).is_file():
        before = read_request(paths)
        job = hand_over(sbatch, paths, text, before | about | {"tasks": [*before["tasks"], list(indices)]})
        run = RunDirectory.open(paths.run)
        run.finish("running", NOT_BEGUN)
        return job
    run = RunDirectory.create(paths.run, "sweep", sys.argv, plan.seed, access=access, plan=resolved(plan))
    try:
        run.finish("running", NOT_BEGUN)
        paths.folder.mkdir()
        paths.parts.mkdir()
        shutil.copyfile(file, paths.plan)
        paths.plan.chmod(0o600)  # its commands and variables may hold secrets
        return hand_over(sbatch, paths, text, about | {"tasks": [list(indices)]})
    except (UsageError, OSError):
        for folder in (paths.folder, paths.parts):
            shutil.rmtree(folder, ignore_errors=True)
        (paths.run / RUN_JSON).unlink(missing_ok=True)
        paths.run.rmdir()
        raise
