"""Reads logs of NCCL's Inspector plug-in: the completed operations of a process, as JSON Lines.

The format is that of plugins/profiler/inspector in NCCL, versions v4.0 to v4.3. Since v4.3, the communicator and the
process stand only in the line before its operations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringtap.analysis.process_traces.process_trace import END_UNKNOWN, OperationReader, OperationTrace
from ringtap.core.append_only_logs import each_json_line
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import COUNT, Number, Shape, ShapeError, Text, check

_PROMETHEUS = ".prom"  # ending of the files of NCCL_INSPECTOR_PROM_DUMP=1
_US = Number(0, 2**52, whole=True)
_LINE: Shape = {
    "header?": {"id": str, "comm_name?": str, "rank": COUNT, "n_ranks": COUNT},
    "metadata?": {
        "inspector_output_format_version": Text(r"v4\.\d+", "version 4 of the format"),
        "hostname": str,
        "pid": COUNT,
    },
    "dump_stats?": {"coll_dropped_since_last_dump?": COUNT, "p2p_dropped_since_last_dump?": COUNT},
    "coll_perf?": dict,
    "p2p_perf?": dict,
}


def _operation_shape(kind: str) -> Shape:
    times = {
        f"{kind}_start_ts": _US,
        "kernel_events": [{"kernel_start_ts": _US, "kernel_stop_ts": _US}],
    }
    return {
        kind: str,
        f"{kind}_sn": COUNT,
        f"{kind}_msg_size_bytes": COUNT,
        f"{kind}_exec_time_us": _US,
        f"{kind}_timing_source?": str,
        f"{kind}_algo?": str,
        f"{kind}_proto?": str,
        f"{kind}_peer?": Number(-1, 2**31, whole=True),
        f"{kind}_busbw_gbs?": Number(0, 1e15),
        "event_trace_ts?": times,
    }


_OPERATIONS = {kind: _operation_shape(kind) for kind in ("coll", "p2p")}


def read_nccl_inspector(path: Path) -> OperationTrace:
    """Read the log of a process.

    An operation lasts from the first start of a kernel of it that NCCL's threads noticed to the last end.

    Raises:
        UsageError: it cannot be read, is damaged, holds several processes, no operation, operations without times, or
            too many.
    """
    if path.suffix == _PROMETHEUS:
        said = "has sums of operations for Prometheus, without their times"
        advice = "unset NCCL_INSPECTOR_PROM_DUMP, set NCCL_INSPECTOR_DUMP_VERBOSE=1, and record the job anew"
        raise UsageError(f"{path} {said}: {advice}")
    reader = OperationReader(path, "NCCL Inspector")
    header: dict[str, Any] = {}
    process: tuple[int, str] | tuple[()] = ()
    number = lost = 0
    try:
        for number, item, why, _ in each_json_line(path, _LINE):
            if item is None:
                raise ShapeError(why)
            header = item.get("header", header)
            if metadata := item.get("metadata"):
                process, before = (metadata["pid"], metadata["hostname"]), process
                if before not in ((), process):
                    raise UsageError(f"{path}, line {number} is of another process: name one file per process")
            if not header or not process:
                raise ShapeError("no line before it says its communicator and process")
            if stats := item.get("dump_stats"):
                lost += sum(stats.get(f"{kind}_dropped_since_last_dump", 0) for kind in _OPERATIONS)
            for kind in _OPERATIONS:
                if f"{kind}_perf" in item and not _add(reader, item[f"{kind}_perf"], kind, header):
                    said = "has no times of its operation: set NCCL_INSPECTOR_DUMP_VERBOSE=1 and record the job anew"
                    raise UsageError(f"{path}, line {number} {said}")
    except ShapeError as error:
        what = f"{path}, line {number} is not of a whole log of NCCL Inspector ({error})"
        raise UsageError(f"{what}: remove the line, or record the job anew") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not process or not reader.operations:
        raise UsageError(f"{path} has no operation: it is not a log of NCCL Inspector, or its job ended too early")
    left_out = f"{path} lacks {lost:,} operations: set NCCL_INSPECTOR_DUMP_COLL_RING_SIZE higher to keep more"
    return reader.trace(None, *process, left_out=left_out if lost else "")


def _add(reader: OperationReader, operation: dict[str, Any], kind: str, header: dict[str, Any]) -> bool:
    """Add an operation; return False if the log does not have its times.

    Args:
        reader: receives it.
        operation: as logged.
        kind: ``coll`` or ``p2p``, with which its keys begin.
        header: its communicator.
    """
    check(operation, _OPERATIONS[kind], f"{kind}_perf")
    times = operation.get("event_trace_ts")
    if times is None:
        return False
    size = operation[f"{kind}_msg_size_bytes"]
    # channels that the operation did not use have zeros
    kernels = [[one[f"kernel_{end}_ts"] for one in times["kernel_events"]] for end in ("start", "stop")]
    starts, stops = ([time for time in column if time] for column in kernels)
    begin_us = min(starts, default=times[f"{kind}_start_ts"])
    span_ns = (begin_us * 1000, max(stops, default=begin_us) * 1000)
    facts = {
        "sequence": operation[f"{kind}_sn"],
        "size_bytes": size,
        "peer": operation.get(f"{kind}_peer"),
        "algorithm": operation.get(f"{kind}_algo"),
        "protocol": operation.get(f"{kind}_proto"),
        "duration_us": operation[f"{kind}_exec_time_us"],
        "duration_source": operation.get(f"{kind}_timing_source"),
        "bus_bandwidth_gbs": operation.get(f"{kind}_busbw_gbs"),
    }
    title = f"{header.get('comm_name', '')} {header['id']}, rank {header['rank']} of {header['n_ranks']}"
    note = "" if stops else END_UNKNOWN
    reader.add(span_ns, (operation[kind], size, note), f"communicator {title.strip()}", facts)
    return True
