"""``ringtap workload export``: a workload as the input of another simulator or benchmark."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.options import add_force
from ringtap.workload.options import add_algorithms, algorithms, write_output

_FORMATS = ("goal", "astra1", "param")


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload export``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", type=Path, metavar="W", help="a directory of execution traces")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="format of the file")
    add_algorithms(parser)
    parser.add_argument("-o", dest="output", required=True, metavar="FILE", type=Path, help="file to write")
    add_force(parser)
    parser.set_defaults(handler=_export)


def _export(options: argparse.Namespace) -> int:
    from ringtap.workload.export import astra1, goal, param
    from ringtap.workload.lowering import lower
    from ringtap.workload.workload import check_workload, read_workload

    if options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists: name another file or add --force")
    workload = read_workload(options.workload)
    if options.to == "goal":
        lowered = lower(workload, algorithms(options))
        check_workload(lowered)
        text = "\n".join(goal(lowered))
    elif options.to == "astra1":
        text = "\n".join(astra1(workload))
    else:
        text = json.dumps(param(workload), indent=1)
    write_output(options.output, text + "\n")
    print(f"Wrote {options.output}")
    return 0
