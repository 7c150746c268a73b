"""Implements ``ringtap run``, ``record`` and ``sweep``: reads their options and starts the work."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_json, add_metrics, add_verbose
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import add_access
from ringtap.core.run_directory_schema import EVERY
from ringtap.core.terminal_escaping import progress_bar, shell_word, visible
from ringtap.core.units import counted, format_duration

if TYPE_CHECKING:
    from ringtap.agents.job.run_location import RunLocation
    from ringtap.agents.node.recording_settings import RunSettings
    from ringtap.agents.sweep.conductor import SweepProgress
    from ringtap.core.sweep_plans.sweep_plan import SweepPlan


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add one of the subcommands of this module."""
    parser = subparsers.add_parser(name, help=summary, description=summary)
    {"run": _register_run, "record": _register_record, "sweep": _register_sweep}[name](parser)


def _register_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--collect",
        default="default",
        metavar="LIST",
        help="what to record, comma separated: collectors that `ringtap doctor` lists, steps, ddp, horovod, nccl, "
        "profile, default (all but packets, horovod and profile), all (but profile), none",
    )
    parser.add_argument(
        "--every",
        default=EVERY,
        metavar="TIME",
        help=f"period of the collectors, 1ms to 60s (default: {EVERY}); `10ms,sockets=100ms` sets another for one",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="run directory to make (default: runs/<UTC>-<name>-<hex>)"
    )
    add_access(parser)
    parser.add_argument("--node", metavar="NAME", help="this node's name in the run (default: its host name)")
    parser.add_argument(
        "--join", type=Path, metavar="DIR", help="run directory that several nodes share: the first makes it"
    )
    add_verbose(parser)
    parser.add_argument("--live", action="store_true", help="watch the run in this terminal (see ringtap live)")
    parser.add_argument("--interface", metavar="NIC", help="packets: the interface to capture on")
    parser.add_argument("--filter", metavar="BPF", help="packets: a capture filter, as tcpdump takes it")
    parser.add_argument("--snap", metavar="BYTES", help="packets: bytes to keep of each packet")
    parser.add_argument(
        "--packets-around-slow",
        metavar="PERCENTILE:TIME",
        help="packets: keep only those around slow iterations of a job; p99:5s keeps 5 s before and after each one "
        "over the 99th percentile",
    )
    parser.add_argument(
        "--disk-limit",
        metavar="SIZE",
        help="size that this node's recording may take, for example 2GB: the oldest packets are deleted before, and "
        "without packets the recording ends there; the job goes on",
    )


def _register_run(parser: argparse.ArgumentParser) -> None:
    _register_recording(parser)
    add_metrics(parser)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also record parameters, layer times and communication of some iterations, for ringtap workload",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the training job, as usual")
    parser.set_defaults(handler=_run)


def _register_record(parser: argparse.ArgumentParser) -> None:
    _register_recording(parser)
    parser.add_argument("--duration", metavar="TIME", help="how long (default: until Ctrl-C)")
    parser.add_argument(
        "--pid", type=int, action="append", default=[], help="watch this process until it ends; may be repeated"
    )
    parser.set_defaults(handler=_record)


def _register_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="the sweep plan")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="run directory to make (default: runs/<UTC>-<name>-<hex>)"
    )
    add_access(parser)
    without_measuring = parser.add_mutually_exclusive_group()
    without_measuring.add_argument(
        "--dry-run", action="store_true", help="print the points and the time they will take; measure nothing"
    )
    parser.add_argument("--resume", action="store_true", help="resume the interrupted sweep in DIR, if there is one")
    parser.add_argument(
        "--series",
        default="",
        metavar="NAME",
        help="measure only this series: MODEL-TRAFFIC, with -TRANSPORT and -COLLECTIVE if it has them",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also measure loads beyond the sender's calibration, and on links that others use",
    )
    parser.add_argument(
        "--report", action="store_true", help="write DIR/report/report.html anew after each point, and at the end"
    )
    without_measuring.add_argument(
        "--clean",
        action="store_true",
        help="remove the folders that ended sweeps left on the plan's hosts; measure nothing",
    )
    add_json(parser)
    parser.set_defaults(handler=_sweep)


def _settings(options: argparse.Namespace) -> RunSettings:
    from ringtap.agents.node.recording_settings import check_disk_limit, parse_settings
    from ringtap.core.units import parse_size_bytes

    snap = options.snap
    if snap is not None:
        snap = str(int(snap) if snap.isdigit() else parse_size_bytes(snap, "--snap"))
    packets = {"interface": options.interface, "filter": options.filter, "snap_bytes": snap}
    packets["around_slow"] = options.packets_around_slow
    collect = f"{options.collect},steps,profile" if getattr(options, "profile", False) else options.collect
    settings = parse_settings(collect, options.every, packets, options.disk_limit)
    if options.join is None:
        check_disk_limit(settings)
    return settings


def _check_live(live: bool) -> None:
    """Refuse ``--live`` before anything starts if the view cannot be shown."""
    if live and os.isatty(0) and os.isatty(1):  # elsewhere it is shown as plain lines
        from ringtap.core.installation import require

        require("--live", ("textual", "rich"))


def _print_location(location: RunLocation, settings: RunSettings, node: str, verbose: bool) -> None:
    from ringtap.agents.job.supervisor import tell

    if location.node != node:
        tell(f"ringtap: another machine of this run is called {node}: this one is {location.node} in it")
    if location.created:
        details = f" node={location.node} {settings.line()}" if verbose else ""
        tell(f"ringtap: recording to {location.label}{details}")


def _run(options: argparse.Namespace) -> int:
    from ringtap.agents.job.environment import is_first_on_node
    from ringtap.agents.job.run_location import find_location, node_name
    from ringtap.agents.job.supervisor import run_job, run_unrecorded, tell
    from ringtap.core.installation import with_shipped_examples
    from ringtap.core.run_directory import UnwritableError

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    settings, node = _settings(options), node_name(options.node)
    if not command:
        raise UsageError("nothing to run: ringtap run -- COMMAND")
    command = with_shipped_examples(command, lambda text: tell(f"ringtap: {text}"))
    _check_live(options.live)
    metrics = None
    if options.metrics and is_first_on_node(os.environ):
        from ringtap.core.http_listen_address import METRICS_PATH, listener_or_url, url_of

        metrics = listener_or_url(options.metrics, options.metrics_public)
    try:
        location = find_location(Path(command[0]).name, options.output, options.join, node, settings, options.access)
    except UsageError as error:
        if options.join is None and not isinstance(error, UnwritableError):
            raise
        return run_unrecorded(command, str(error))
    _print_location(location, settings, node, options.verbose)
    if metrics:
        where = f"to {metrics}" if isinstance(metrics, str) else f"at {url_of(metrics, METRICS_PATH)}"
        tell(f"ringtap: metrics {where}")
    return run_job(location, settings, command, options.live, metrics)


def _record(options: argparse.Namespace) -> int:
    from ringtap.agents.job.run_location import find_location, node_name
    from ringtap.agents.node.record_without_job import check_pids, record
    from ringtap.core.units import parse_duration_s

    settings, node = _settings(options), node_name(options.node)
    seconds = parse_duration_s(options.duration, "--duration") if options.duration else None
    if options.packets_around_slow and options.join is None:
        raise UsageError(
            "--packets-around-slow needs the iterations of a job: use ringtap run, or add --join with a job's run"
        )
    check_pids(options.pid)
    _check_live(options.live)
    location = find_location("record", options.output, options.join, node, settings, options.access)
    _print_location(location, settings, node, options.verbose)
    return record(location, settings, seconds, options.pid, options.live)


def _clean(plan: SweepPlan, as_json: bool) -> int:
    """Remove ended sweeps' folders from a plan's hosts; returns the exit code, 1 if a host cannot be reached."""
    import json
    from dataclasses import asdict

    from ringtap.agents.hosts.ssh import SshHosts
    from ringtap.agents.sweep.host_connections import reached
    from ringtap.core.sweep_plans.cluster_hosts import Cluster
    from ringtap.core.units import format_size

    if not isinstance(plan.topology, Cluster) or plan.topology.reach != "ssh":
        raise UsageError('--clean is for plans with reach = "ssh": other hosts keep nothing of a sweep')
    with reached(plan.topology, all_needed=False) as hosts:
        assert isinstance(hosts, SshHosts)
        removed, lost = hosts.clean(), hosts.lost()
    if as_json:
        print(json.dumps({"removed": [asdict(leftover) for leftover in removed], "not_reached": lost}))
    else:
        for leftover in removed:
            origin = f", of {leftover.run}" if leftover.run else ""
            print(f"{leftover.host}: removed {leftover.path} ({format_size(leftover.size_bytes)}{origin})")
        locks = sum(leftover.path.endswith(".lock") for leftover in removed)
        agents = f" and the files of {counted(locks, 'killed agent')}" if locks else ""
        folders = counted(len(removed) - locks, "folder")
        print(f"Removed {folders}{agents} from {counted(len(hosts.names) - len(lost), 'host')}")
    for host, why in lost.items():
        print(f"ringtap: {host} cannot be used over ssh: {why}", file=sys.stderr)
    return 1 if lost else 0


def _sweep(options: argparse.Namespace) -> int:
    import json

    from ringtap.agents.job.foreground_command import termination_as_interrupt
    from ringtap.agents.sweep.conductor import check_series, count_points, run_sweep
    from ringtap.agents.sweep.job_launch_commands import check_collectives
    from ringtap.agents.sweep.sweep_estimate import print_estimate, to_json
    from ringtap.core.run_directory_schema import REPORT_HTML
    from ringtap.core.sweep_plans.sweep_plan import load_plan

    plan = load_plan(options.plan)
    if options.clean:
        return _clean(plan, options.json)
    check_series(plan, options.series)
    check_collectives(plan)
    if options.dry_run:
        if options.json:
            print(json.dumps(to_json(plan, options.series)))
        else:
            print_estimate(plan, options.series)
        return 0
    if options.resume and not options.output:
        raise UsageError("--resume needs the sweep's folder: -o DIR")
    begin_s = time.monotonic()
    with termination_as_interrupt(), closing(_SweepDisplay()) as display:
        path = run_sweep(
            plan,
            options.output,
            progress=display.show,
            resume=options.resume,
            force=options.force,
            series=options.series,
            access=options.access,
            report=options.report,
        )
    count = count_points(path)
    answer = _answer(path) if options.report else None
    if options.json:
        duration_s = round(time.monotonic() - begin_s, 1)
        item = {"path": str(path), "status": "complete", "points": count, "duration_s": duration_s}
        page = None if answer is None else str(path / REPORT_HTML)
        print(json.dumps(item | ({"answer": answer, "report": page} if options.report else {})))
    elif answer is None:
        print(f"Wrote {path}: {counted(count, 'point')}. Next: ringtap report {shell_word(path)}")
    else:
        print(f"{answer}\nWrote {path}: {counted(count, 'point')}")
        print(f"Wrote {path / REPORT_HTML}\nNext: open {shell_word(path / REPORT_HTML)}")
    return 0


def _answer(path: Path) -> str | None:
    """Return the headline of a complete sweep's report; None if the report is not of the whole sweep."""
    from ringtap.core.run_directory import read_json
    from ringtap.core.run_directory_schema import REPORT_JSON

    try:
        item = read_json(path / REPORT_JSON, {"answer": str, "run": {"status": str}})
    except UsageError:  # a warning has said why there is none
        return None
    return str(item["answer"]) if item["run"]["status"] == "complete" else None


class _SweepDisplay:
    """Progress of a sweep on standard error: a bar on a terminal, and a line for each message."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None

    def show(self, progress: SweepProgress) -> None:
        """Show a report of the sweep."""
        if self._bar is None and progress.total_s:
            columns = ("{task.description}", "BarColumn", "{task.percentage:>3.0f} %", "TimeRemainingColumn")
            self._bar = progress_bar(*columns) or False
            self._task = self._bar and self._bar.add_task("sweep", total=progress.total_s)
        if self._bar:
            label = visible(progress.doing or "sweep")
            self._bar.update(self._task, description=label, completed=progress.done_s)
            if progress.message:
                self._bar.console.print(visible(progress.message), highlight=False, markup=False)
        elif progress.message:
            left = "" if progress.point is None else f"  (about {format_duration(progress.left_s)} left)"
            print(f"{progress.message}{left}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar:
            self._bar.stop()
