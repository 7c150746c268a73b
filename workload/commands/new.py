"""``ringtap workload new``: a workload of a model with known tensors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.models import PROFILES, profile_named
from ringtap.options import add_json
from ringtap.units import counted, format_size, parse_duration_s, whole_number


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload new``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("--model", required=True, metavar="NAME", help=f"one of {', '.join(PROFILES)}")
    parser.add_argument("--workers", required=True, metavar="N", help="number of data-parallel workers")
    parser.add_argument("--compute", metavar="TIME", help="forward and backward pass (default: the model's)")
    parser.add_argument("-o", dest="output", required=True, metavar="W", type=Path, help="directory to create")
    add_json(parser)
    parser.set_defaults(handler=_new)


def _new(options: argparse.Namespace) -> int:
    from ringtap.workload.models import buckets, model_workload
    from ringtap.workload.workload import summary, write_workload

    profile, workers = profile_named(options.model), whole_number(options.workers, "--workers")
    if workers < 1:
        raise UsageError(f"{workers} workers: at least one is needed")
    compute_s = None if options.compute is None else parse_duration_s(options.compute)
    made = model_workload(profile, workers, compute_s)
    write_workload(made, options.output)
    if options.json:
        print(json.dumps(summary(made) | {"about": made.about}))
        return 0
    sizes = [size for size, _ in buckets(profile)]
    print(
        f"{profile.title} on {counted(workers, 'worker')}: {counted(len(sizes), 'bucket')} of "
        f"{format_size(min(sizes))} to {format_size(max(sizes))}, {made.about['compute_s']:g} s of computation, "
        f"in {options.output}"
    )
    print("\n".join(f"Assumed: {text}" for text in made.about["assumptions"]))
    print(f"Next: ringtap workload simulate {options.output}")
    return 0
