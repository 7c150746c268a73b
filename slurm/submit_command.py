"""Implements ``ringtap submit``: reads its options, and submits a command or a sweep plan."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_json
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import add_access
from ringtap.core.run_directory_schema import EVERY
from ringtap.core.terminal_escaping import shell_word

if TYPE_CHECKING:
    from ringtap.slurm.site_profiles import Site
    from ringtap.slurm.submission_request import Environment, Resources


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``submit`` verb."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary,
        usage="ringtap submit [options] (-- COMMAND | PLAN.toml)",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="-- COMMAND | PLAN.toml", help="what to run, or what to measure")
    parser.add_argument(
        "--site", metavar="SITE", help="cluster, or a profile's path (default: $CC_CLUSTER where it is known, generic)"
    )
    parser.add_argument("--print", action="store_true", help="print the batch script and submit nothing")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="run directory, on a shared file system")
    add_access(parser)
    add_json(parser)
    _add_resources(parser.add_argument_group("what the job gets"))
    _add_environment(parser.add_argument_group("its Python"))
    job = parser.add_argument_group("what is recorded and kept (for a command; a plan determines this itself)")
    add_recording(job)
    parser.set_defaults(handler=_submit)


def add_recording(group: Any) -> None:
    """Add the options for what is recorded of a command, and kept."""
    group.add_argument("--collect", default="default", metavar="LIST", help="as of ringtap run (default: default)")
    group.add_argument("--every", default=EVERY, metavar="TIME", help=f"as of ringtap run (default: {EVERY})")
    group.add_argument(
        "--packets-around-slow",
        metavar="PERCENTILE:TIME",
        help="as of ringtap run (default: all packets)",
    )
    group.add_argument("--disk-limit", metavar="SIZE", help="of each node, as of ringtap run (default: none)")
    group.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="PATTERN",
        help="files below $SLURM_TMPDIR to copy to DIR/results/<node> at the end; may be repeated",
    )
    group.add_argument("--horovod", action="store_true", help="give each rank Horovod's variables (Gloo, no ssh)")


def _add_resources(group: Any) -> None:
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
    group.add_argument("--tasks-per-node", type=int, default=1, metavar="N", help="tasks per node (default: 1)")
    group.add_argument("--cpus-per-task", type=int, metavar="N", help="cores per task")
    group.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="GPUs per node, such as 4 or h100:4")
    group.add_argument("--mem", metavar="SIZE", help="memory per node in Slurm's notation: 64G")
    group.add_argument("--time", metavar="TIME", help="time limit in Slurm's notation: 30 (minutes), 3:00:00, 1-12")
    group.add_argument("--account", metavar="NAME", help="account to charge")
    group.add_argument("--job-name", metavar="NAME", help="name that squeue shows (default: from the command or plan)")
    group.add_argument(
        "--stop-before", default="120s", metavar="TIME", help="stop the job this long before the limit (default: 120s)"
    )
    group.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="TEXT",
        help="further directive, such as partition=debug; repeatable",
    )
    group.add_argument(
        "--drop", action="append", default=[], metavar="NAME", help="directive to leave out, such as mem; repeatable"
    )


def _add_environment(group: Any) -> None:
    group.add_argument(
        "--python", metavar="PATH", help="interpreter with ringtap, on a shared file system (default: this)"
    )
    group.add_argument(
        "--module", action="append", default=[], metavar="NAME", help="further module to load; repeatable"
    )
    group.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="make an environment on each node from the site's wheels and those in DIR",
    )
    group.add_argument(
        "--requirement", type=Path, metavar="FILE", help="also install the packages of this requirements file in it"
    )


def _submit(options: argparse.Namespace) -> int:
    from ringtap.slurm.site_profiles import load_site
    from ringtap.slurm.submission_request import check_resources

    words: list[str] = options.words
    plan = Path(words[0]) if len(words) == 1 and words[0].endswith(".toml") else None
    if not words:
        raise UsageError("nothing to submit: ringtap submit -- COMMAND, or ringtap submit PLAN.toml")
    site = load_site(options.site)
    name = plan.stem if plan else Path(words[0]).name
    resources = check_resources(_resources(options, name), site, os.environ)
    environment = _environment(options)
    if plan:
        from ringtap.slurm.submit_arrays import submit_plan

        return submit_plan(plan, options, site, resources, environment)
    return _submit_command(options, site, resources, environment)


def _resources(options: argparse.Namespace, name: str) -> Resources:
    from ringtap.core.units import parse_duration_s
    from ringtap.slurm.submission_request import Resources

    names = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "mem", "time", "account")
    usual_name = f"ringtap-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
    return Resources(
        **{name: getattr(options, name) for name in names},
        job_name=usual_name if options.job_name is None else options.job_name,
        stop_before_s=round(parse_duration_s(options.stop_before, "--stop-before")),
        sbatch=tuple(options.sbatch),
        drop=tuple(options.drop),
    )


def _environment(options: argparse.Namespace) -> Environment:
    from ringtap.slurm.submission_request import Environment

    if options.requirement is not None and options.wheels is None:
        raise UsageError(
            "--requirement is for an environment that needs ringtap's own wheel too: ringtap bundle, --wheels DIR"
        )
    if options.wheels is not None and options.python is not None:
        raise UsageError("--python names an environment, and --wheels makes one: give one of them")
    python = None if options.wheels is not None else os.path.abspath(options.python or sys.executable)  # noqa: PTH100 (keeps links)
    paths = [None if path is None else path.absolute() for path in (options.requirement, options.wheels)]
    return Environment(python, tuple(options.module), *paths)


def _submit_command(options: argparse.Namespace, site: Site, resources: Resources, environment: Environment) -> int:
    from ringtap.core.run_directory import new_name
    from ringtap.slurm.batch_script import command_script, print_script
    from ringtap.slurm.submission_file_names import SubmitPaths
    from ringtap.slurm.submission_request import Recording, Request, describe_resources
    from ringtap.slurm.submit import check_files, check_place, read_only_place, submit_command

    request = Request(
        command=tuple(options.words),
        folder=Path.cwd(),
        resources=resources,
        environment=environment,
        recording=Recording.of(options),
        keep=tuple(options.keep),
        horovod=options.horovod,
    )
    check_files(request)
    path = options.output or Path("runs") / new_name(Path(request.command[0]).name)
    paths = SubmitPaths(path)
    if options.print:
        print_script(command_script(request, site, paths))
        return 0
    warnings = check_place(paths.run, site)
    if read_only_place(request.folder, site, os.environ):
        warnings.append(f"the job runs in {request.folder}, which is read-only on the nodes of {site.name}")
    for warning in warnings:
        print(f"ringtap: {warning}", file=sys.stderr)
    job = submit_command(request, site, path, options.access)
    if options.json:
        print(json.dumps({"job": job, "run": str(paths.run), "script": str(paths.script), "site": site.name}))
    else:
        print(f"Submitted job {job} to {site.name}: {describe_resources(resources, environment)}")
        print(f"Wrote {path / paths.script.relative_to(paths.run)}. Next: ringtap status {shell_word(path)}")
    return 0
