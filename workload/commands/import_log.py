"""``ringtap workload import``: the result of another simulator, from its log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.options import add_json
from ringtap.terminal import text_table
from ringtap.workload.simulator_logs import read_log


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload import``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("log", type=Path, metavar="LOG", help="log of ASTRA-sim 1.0 or 2.x")
    add_json(parser)
    parser.set_defaults(handler=_import)


def _import(options: argparse.Namespace) -> int:
    found = read_log(options.log)
    if options.json:
        print(json.dumps(found.to_json()))
        return 0
    print(f"{found.cycles:,} cycles ({found.cycles / 1e6:g} ms at 1 ns per cycle) in {found.simulator}")
    rows = [[layer, what.removesuffix("_cycles").replace("_", " "), f"{cycles:,}"]
            for layer, values in found.layers.items() for what, cycles in values.items() if cycles]  # fmt: skip
    if rows:
        print("\n".join(text_table([["layer", "spent on", "cycles"], *rows], left=2)))
    print("\n".join(f"Warning: {text}" for text in found.warnings), end="\n" if found.warnings else "")
    return 0
