"""``ringtap status``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.terminal import one_line, shell_word
from ringtap.units import counted

if TYPE_CHECKING:
    from ringtap.slurm.status import SeriesStanding, Standing

_SHOWN_NODES = 16


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``status`` verb."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}. Reads its files, and asks Slurm once where they leave something open.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of ringtap submit or ringtap sweep")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(handler=_status)


def _status(options: argparse.Namespace) -> int:
    from ringtap.rundir import RunDirectory
    from ringtap.slurm.status import standing

    found = standing(RunDirectory.open(options.run))
    if options.json:
        print(json.dumps(found.to_json()))
        return 0
    for line in lines(found):
        print(one_line(line))
    return 0


def lines(found: Standing) -> list[str]:
    """A run's standing for people."""
    told = [f"{found.run}: {found.status}" + (f": {found.why}" if found.why else "")]
    if found.not_asked:
        told.append(f"  {found.not_asked}")
    if found.kind == "sweep":
        width = max((len(one.series) for one in found.series), default=0)
        above = found.why if len(found.series) == 1 else ""  # the only series' reason stands there
        told += [f"  {one.index:3d} {one.series:<{width}}  {_series(one, above)}" for one in found.series]
    else:
        told += [f"  job {job.job}: {job.state}" + (f": {job.why}" if job.why else "") for job in found.jobs]
        told += _nodes(found)
    return [*told, *_next(found)]


def _series(one: SeriesStanding, above: str) -> str:
    text = f"{one.points} of {counted(one.points + len(one.missing), 'point')}, {one.status}"
    if one.job and one.status in ("waiting", "running", "unknown"):
        text += f" as job {one.job}"
    return text + (f": {one.why}" if one.why and one.why not in above else "")


def _nodes(found: Standing) -> list[str]:
    """The nodes by what became of them; of those as they should be only the number, of the others their names."""
    from ringtap.slurm.status import clock

    count: dict[str, int] = {}
    for node in found.nodes:
        count[node.status] = count.get(node.status, 0) + 1
    told = ["  nodes: " + ", ".join(f"{number} {status}" for status, number in count.items())] if count else []
    odd = [node for node in found.nodes if node.status in ("cut off", "partial")]
    for node in odd[:_SHOWN_NODES]:
        last = f"wrote last at {clock(node.written_s)}" if node.written_s else "wrote nothing"
        told.append(f"    {node.node} {node.status}: {node.why or last}")
    if len(odd) > _SHOWN_NODES:
        told.append(f"    and {len(odd) - _SHOWN_NODES} more (--json lists all)")
    return told


def _next(found: Standing) -> list[str]:
    from ringtap.slurm.status import is_submitted

    run = shell_word(found.run)
    if found.kind == "job":
        return [f"Next: ringtap analyze {run}"] if found.status in ("complete", "partial", "failed") else []
    if not is_submitted(found):
        if found.status in ("partial", "failed"):
            return [f"To measure what is missing: ringtap sweep PLAN.toml -o {run} --resume"]
        return [f"Next: ringtap report {run}"] if found.status == "complete" else []
    again = [f"To measure what is missing: ringtap submit PLAN.toml -o {run}"]
    stopped = any(one.status == "stopped" for one in found.series)
    return [*(again if stopped else []), f"Next: ringtap collect {run}"]
