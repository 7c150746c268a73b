"""Implements ``ringtap merge``: merges the points of a submitted sweep's parts into its run directory.

The points refer to the parts: nothing is copied and no part is changed, so a sweep can be merged while its jobs
write, and again later.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringtap.agents.node.node_json import node_items, not_collected
from ringtap.core.command_options import add_json
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory, Status
from ringtap.core.run_directory_schema import POINTS_JSONL, REJECTED_JSONL
from ringtap.core.terminal_escaping import one_line, shell_word
from ringtap.core.untrusted_files import replace_file
from ringtap.slurm.read_array_parts import Part, read_parts
from ringtap.slurm.status import FINAL, Standing, next_steps, standing, sweep_standing
from ringtap.slurm.submission_file_names import SubmitPaths


def merge_run(run: RunDirectory) -> tuple[Standing, list[str]]:
    """Update a submitted run: merge the parts of a sweep, or finish a run that its job could not finish.

    Returns:
        The status of the run, and one sentence for each part that was left out.

    Raises:
        UsageError: the run was not submitted, or its files are damaged.
    """
    paths = SubmitPaths(run.path)
    if not paths.request.is_file():
        raise UsageError(f"{run.path} was not submitted by ringtap: it has no {paths.request.relative_to(paths.run)}")
    if run.info.get("kind") != "sweep":
        found = standing(run)
        if found.status in FINAL and (found.status, found.why) != (run.info.get("status"), run.info.get("why")):
            run.info["not_collected"] = not_collected(node_items(run))
            run.finish(found.status, found.why)
        return found, []
    parts: list[Part] = []
    while (now := read_parts(run)) != parts:  # a concurrent collector may have read less and written later
        parts = now
        found = sweep_standing(run, parts)
        problems = merge(run, parts)
        reasons = dict.fromkeys(
            f"{series.series}: {series.why}" for series in found.series if series.status == "stopped"
        )
        status: Status = found.status if found.status in FINAL else "running"
        run.finish(status, "" if status == "complete" else "; ".join([found.why, *reasons]))
    return found, problems


def merge(run: RunDirectory, parts: Sequence[Part]) -> list[str]:
    """Write the points of all parts into a sweep's run directory, and set the facts about their measurement.

    Args:
        run: the sweep; its ``info`` is changed, but run.json is not written.
        parts: the parts of the sweep.

    Returns:
        One sentence for each part that was left out.
    """
    measured = [part for part in parts if part.points]
    # a run directory has one description of the bottleneck for all of its points
    bottleneck = measured[0].info.get("bottleneck") if measured else None
    taken = [part for part in measured if part.info.get("bottleneck") == bottleneck]
    _write_lines(run.path / POINTS_JSONL, (_relocated(part, item) for part in taken for item in part.points))
    _write_lines(run.path / REJECTED_JSONL, (_relocated(part, item) for part in taken for item in part.rejected))
    lacking = [item for part in parts for item in part.info.get("not_collected") or []]
    run.info |= {
        "bottleneck": bottleneck,
        "precheck": _lowest(item for part in taken for item in part.info.get("precheck") or []),
        "calibration": next(filter(None, (part.info.get("calibration") for part in taken)), None),
        "not_collected": list({json.dumps(item, sort_keys=True): item for item in lacking}.values()),
    }
    return [
        f"the points of {part.path.name} are left out: its bottleneck was counted at other interfaces than that of "
        f"{taken[0].path.name}; look at it on its own with ringtap report {shell_word(part.path)}"
        for part in measured
        if part not in taken
    ]


def _relocated(part: Part, window: dict[str, Any]) -> dict[str, Any]:
    """Return a window of a part with its directory relative to the sweep."""
    return window | {"directory": f"{part.path.parent.name}/{part.path.name}/{window['directory']}"}


def _write_lines(path: Path, items: Iterable[dict[str, Any]]) -> None:
    """Write JSON Lines under a temporary name and rename the file, so that readers see the old or the new one."""
    replace_file(path, "".join(json.dumps(item, allow_nan=False) + "\n" for item in items).encode())


def _lowest(prechecks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lowest precheck of each traffic kind; all series of the kind reached at least as much."""
    lowest: dict[str, dict[str, Any]] = {}
    for item in prechecks:
        kind = str(item["kind"])
        if kind not in lowest or _reached(item) < _reached(lowest[kind]):
            lowest[kind] = item
    return list(lowest.values())


def _reached(precheck: dict[str, Any]) -> float:
    share = precheck.get("share_of_capacity")
    return -1.0 if share is None else float(share)  # an unrecorded share may be the least


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``merge`` verb."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}, so that ringtap report reads them as one. It can be run at any time, and again: "
        "it changes no measurement.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of ringtap submit")
    add_json(parser)
    parser.set_defaults(handler=_merge)


def _merge(options: argparse.Namespace) -> int:
    found, problems = merge_run(RunDirectory.open(options.run))
    for problem in problems:
        print(f"ringtap: {one_line(problem)}", file=sys.stderr)
    if options.json:
        print(json.dumps(found.to_json() | {"problems": problems}))
        return 0
    for series in found.series:
        if series.missing:
            loads = ", ".join(f"{load:.0%}" for load in series.missing)
            why = f": {series.why}" if series.why else ""
            print(one_line(f"missing: {series.series} at {loads}: {series.status}{why}"))
    following = [f"Next: ringtap report {shell_word(options.run)}"] if found.kind == "sweep" else next_steps(found)
    text = f"Wrote {options.run}: {found.status}, {one_line(found.why) or 'nothing is missing'}"
    print(". ".join([text, *following]))
    return 0
