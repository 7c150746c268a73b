"""``ringtap run``, ``capture`` and ``sweep``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add one of the verbs of this room."""
    parser = subparsers.add_parser(name, help=summary, description=summary)
    {"run": _register_run, "capture": _register_capture, "sweep": _register_sweep}[name](parser)


def _register_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="run directory to make (default: runs/<UTC>-<name>-<hex>)"
    )
    parser.add_argument("--every", default="10ms", metavar="TIME", help="period of the counters (default: 10ms)")
    parser.add_argument("--node", metavar="NAME", help="this node's name in the run (default: its host name)")
    parser.add_argument("--join", type=Path, metavar="DIR", help="write this node's part of an existing run directory")


def _register_run(parser: argparse.ArgumentParser) -> None:
    _register_recording(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the training job, as usual")
    parser.set_defaults(handler=_run)


def _register_capture(parser: argparse.ArgumentParser) -> None:
    _register_recording(parser)
    parser.add_argument("--duration", metavar="TIME", help="how long (default: until Ctrl-C)")
    parser.set_defaults(handler=_run, command=[])


def _register_sweep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN.toml", help="what to measure (docs/plan.md)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="run directory to make (default: runs/<UTC>-<name>-<hex>)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the points and the time they will take, measure nothing"
    )
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted sweep in DIR")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(handler=_sweep)


def _run(options: argparse.Namespace) -> int:
    import platform

    from ringtap.agents.node import run_node
    from ringtap.rundir import RunDirectory, new_name
    from ringtap.units import parse_duration_s

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.verb == "run" and not command:
        raise UsageError("nothing to run: ringtap run -- COMMAND")
    every_s = parse_duration_s(options.every)
    if not 0.001 <= every_s <= 60:
        raise UsageError(f"--every {options.every} is outside 1ms to 60s")
    duration = getattr(options, "duration", None)
    seconds = parse_duration_s(duration) if duration else None
    node = options.node or platform.node()
    if options.join:
        return run_node(RunDirectory.open(options.join).node(node), command, every_s, seconds)
    path = options.output or Path("runs") / new_name(Path(command[0]).name if command else "capture")
    run = RunDirectory.create(path, "job", sys.argv, seed=0)
    code = run_node(run.node(node), command, every_s, seconds)
    run.finish("failed" if code else "complete", f"the job ended with exit code {code}" if code else "")
    print(f"Wrote {path}", file=sys.stderr)
    return code


def _sweep(options: argparse.Namespace) -> int:
    import json

    from ringtap.agents.estimate import estimate, print_estimate
    from ringtap.agents.sweep import run_sweep
    from ringtap.plan import load_plan
    from ringtap.rundir import new_name

    plan = load_plan(options.plan)
    if options.dry_run:
        points = estimate(plan)
        if options.json:
            print(json.dumps({"points": points, "duration_s": round(sum(point["duration_s"] for point in points), 1)}))
        else:
            print_estimate(plan, points)
        return 0
    if options.resume and not options.output:
        raise UsageError("--resume needs the sweep's folder: -o DIR")
    path = options.output or Path("runs") / new_name(plan.name)
    summary = run_sweep(plan, path, resume=options.resume)
    if options.json:
        print(json.dumps(summary))
    else:
        print(f"Wrote {path}: {summary['points']} points. Next: ringtap report {path}")
    return 0
