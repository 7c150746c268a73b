"""Implements ``ringtap export``: writes tables of a run, or a trace of it, for other programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.errors import UsageError, error_message
from ringtap.core.terminal_escaping import shown_log, text_table
from ringtap.core.units import counted, format_size

if TYPE_CHECKING:
    from ringtap.analysis.export.tables import Export
    from ringtap.analysis.job.run import Job
    from ringtap.analysis.sweeps.sweep import Sweep

# format -> True if it is one file, False if it is a folder of files
_FORMATS = {"parquet": False, "csv": False, "duckdb": True, "tensorboard": False, "perfetto": True}

# option of files that another tool wrote -> what they are
_OTHERS = {
    "--kineto": "traces of torch.profiler",
    "--flight-recorder": "dumps of PyTorch's flight recorder",
    "--nccl-inspector": "logs of NCCL Inspector",
}


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory of a job, of a sweep or of its series")
    parser.add_argument("--to", required=True, choices=_FORMATS, help="format of the output")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder to write; for duckdb and perfetto a file",
    )
    for option, what in _OTHERS.items():
        parser.add_argument(
            option, type=Path, nargs="+", default=[], metavar="FILE", help=f"perfetto: {what} of processes of this run"
        )
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_export)


@shown_log()
def _export(options: argparse.Namespace) -> int:
    from ringtap.analysis.pcap.export_scan_tables import check_new
    from ringtap.analysis.sweeps.sweep import open_run

    if options.to == "perfetto":
        return _export_trace(options)
    for option in _OTHERS:
        if _files(options, option):
            raise UsageError(f"{option} goes with --to perfetto, not with --to {options.to}")
    run, output = open_run(options.run), options.output
    if _FORMATS[options.to]:
        check_new(output, options.force)
    else:
        _check_folder(output, options.force)
    try:
        export = _writer(options.to)(run, output)
    except (OSError, ValueError) as error:  # ValueError: text that is not Unicode, as a name from a torn log
        raise UsageError(f"{output} cannot be written: {error_message(error)}") from error
    for name, reason in export.left_out.items():
        print(f"ringtap: no {name}: {reason}", file=sys.stderr)
    if options.json:
        tables = [{"table": table.name, "rows": table.rows, "bytes": table.size_bytes} for table in export.tables]
        data = {"format": options.to, "path": str(output), "bytes": _size_bytes(output), "tables": tables}
        print(json.dumps(data | {"left_out": export.left_out}, allow_nan=False))
        return 0
    lines = [("table", "rows", "size")]
    for table in export.tables:
        lines.append((table.name, f"{table.rows:,}", "" if table.size_bytes is None else format_size(table.size_bytes)))
    print("\n".join(text_table(lines)))
    print(f"\nWrote {output}: {format_size(_size_bytes(output))}")
    return 0


def _writer(to: str) -> Callable[[Job | Sweep, Path], Export]:
    """Return the function that writes a format."""
    from ringtap.analysis.export import tables

    if to == "tensorboard":
        from ringtap.analysis.export.tensorboard import write_tensorboard

        return write_tensorboard
    return {"parquet": tables.write_parquet, "csv": tables.write_csv, "duckdb": tables.write_duckdb}[to]


def _size_bytes(output: Path) -> int:
    """Return the size of a file, or of all files of a folder."""
    return sum(path.stat().st_size for path in (output, *output.rglob("*")) if path.is_file())


def _export_trace(options: argparse.Namespace) -> int:
    from ringtap.analysis.export.perfetto import write_perfetto
    from ringtap.analysis.job.run import open_job
    from ringtap.analysis.pcap.export_scan_tables import check_new
    from ringtap.analysis.process_traces.flight_recorder import read_flight_recorder
    from ringtap.analysis.process_traces.kineto import read_kineto
    from ringtap.analysis.process_traces.nccl_inspector import read_nccl_inspector

    check_new(options.output, options.force)
    run = open_job(options.run)
    readers = zip(_OTHERS, (read_kineto, read_flight_recorder, read_nccl_inspector), strict=True)
    others = [read(path) for option, read in readers for path in _files(options, option)]
    written = write_perfetto(run, options.output, others)
    if options.json:
        data = {"format": options.to, "path": str(options.output), "iterations": written.iterations}
        data |= {"slices": written.slices, "values": written.values, "bytes": written.size_bytes}
        print(json.dumps(data | {"left_out": written.left_out}, allow_nan=False))
        return 0
    for reason in written.left_out:
        print(f"ringtap: {reason}", file=sys.stderr)
    print(f"{counted(written.iterations, 'iteration')}, {counted(written.slices, 'slice')}", end="")
    print(f" and {counted(written.values, 'value')} of counters in {format_size(written.size_bytes)}.")
    print(f"\nWrote {options.output}")
    print("Next: open it at https://ui.perfetto.dev (the file stays in your browser)")
    return 0


def _files(options: argparse.Namespace, option: str) -> list[Path]:
    """Return the files of an option of `_OTHERS`."""
    files: list[Path] = getattr(options, option.removeprefix("--").replace("-", "_"))
    return files


def _check_folder(folder: Path, force: bool) -> None:
    """Refuse a folder that is in use, before any work."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, and this format is a folder of files: choose another name")
    if not force and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} exists and is not empty: choose another folder, or add --force")
