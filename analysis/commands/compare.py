"""Implements ``ringtap compare``: puts recorded jobs, or the series of sweeps, side by side."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.terminal_escaping import shell_word, shown_log


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "runs", type=Path, metavar="RUN", nargs="+", help="run directories of jobs, or of sweeps for their series"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE.html", help="write a page with the traffic matrices")
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_compare)


@shown_log()
def _compare(options: argparse.Namespace) -> int:
    from ringtap.analysis.compare.comparison_text import describe
    from ringtap.analysis.compare.run_comparison import compare_runs
    from ringtap.analysis.pcap.export_scan_tables import check_new

    if options.output is not None:
        check_new(options.output, options.force)  # before the runs are read
    found = compare_runs(options.runs)
    if options.output is not None:
        found.write_page(options.output, force=options.force)
    if options.json:
        print(json.dumps(found.to_json(), allow_nan=False))
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(describe(found, columns)))
    if options.output is not None:
        print(f"\nWrote {options.output}")
        print(f"Next: open {shell_word(options.output)}", file=sys.stderr)
    return 0
