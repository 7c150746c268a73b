"""``ringtap collect``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ringtap.terminal import one_line, shell_word


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``collect`` verb."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}, so that ringtap report reads them as one. Can be run at any time, and again: nothing "
        "that was measured is changed.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of ringtap submit")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(handler=_collect)


def _collect(options: argparse.Namespace) -> int:
    from ringtap.rundir import RunDirectory
    from ringtap.slurm.collect import collect

    found, problems = collect(RunDirectory.open(options.run))
    for problem in problems:
        print(f"ringtap: {one_line(problem)}", file=sys.stderr)
    if options.json:
        print(json.dumps(found.to_json() | {"problems": problems}))
        return 0
    missing = [one for one in found.series if one.missing]
    for one in missing:
        loads = ", ".join(f"{load:.0%}" for load in one.missing)
        print(one_line(f"missing: {one.series} at {loads}: {one.status}" + (f": {one.why}" if one.why else "")))
    verb = "report" if found.kind == "sweep" else "analyze"
    again = f"ringtap {verb} {shell_word(options.run)}"
    print(f"Wrote {options.run}: {found.status}, {one_line(found.why) or 'nothing is missing'}. Next: {again}")
    return 0
