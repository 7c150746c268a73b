"""``ringtap export``: tables of a run, for other programs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError, error_message
from ringtap.options import add_force, add_json
from ringtap.terminal import shown_log, text_table
from ringtap.units import format_size

_FORMATS = ("parquet", "csv")


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of a job, of a sweep or of its series")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="format of the output")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PATH", help="folder of the tables to write"
    )
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_export)


@shown_log()
def _export(options: argparse.Namespace) -> int:
    from ringtap.analysis.export import tables
    from ringtap.analysis.sweeps.sweep import open_run

    run, output = open_run(options.run), options.output
    _check_folder(output, options.force)
    write = {"parquet": tables.write_parquet, "csv": tables.write_csv}[options.to]
    try:
        written = write(run, output)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error_message(error)}") from error
    for name, reason in written.left_out.items():
        print(f"ringtap: no {name}: {reason}", file=sys.stderr)
    sizes = [table.path.stat().st_size for table in written.tables]
    if options.json:
        items = [
            {"table": table.name, "rows": table.rows, "bytes": size, "path": str(table.path)}
            for table, size in zip(written.tables, sizes, strict=True)
        ]
        data = {"format": options.to, "path": str(output), "tables": items, "left_out": written.left_out}
        print(json.dumps(data, allow_nan=False))
        return 0
    lines = [("table", "rows", "size")]
    lines += [
        (table.name, f"{table.rows:,}", format_size(size)) for table, size in zip(written.tables, sizes, strict=True)
    ]
    print("\n".join(text_table(lines)))
    print(f"\nWrote {output}")
    return 0


def _check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that is in use, before any work."""
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not force)):
        raise UsageError(f"{folder} exists and is not empty: choose another folder, or add --force")
