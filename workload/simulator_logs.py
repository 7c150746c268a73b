"""Reads logs and tables of other simulators: the time that they found, and what each layer cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.core.csv_table import check_cells
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.units import counted

MAX_LOG_BYTES = 2**30
_CYCLES_PER_US = 1000  # 1 cycle is 1 ns; tables of ASTRA-sim 1.0 are in us
# ASTRA-sim 1.0 prints several values in one line, and the letter O in some copies of its logs
_VALUE = re.compile(r"id: (?P<layer>[^,\n]*?) ,Total cycles spent (?:on )?(?P<what>[a-z ]+?): (?P<cycles>\d{1,20}|O)\b")
_END = re.compile(r"all passes finished at time: (?P<cycles>\d{1,20})\b")
_STREAMS = re.compile(r"Total streams (?P<what>injected|finished): (?P<count>\d{1,20})\b")
_NODES = re.compile(r"^total nodes: (?P<count>\d{1,9})\b", re.MULTILINE)
# ASTRA-sim 2.x
_RANK = re.compile(
    r"sys\[(?P<rank>\d{1,9})\] finished, (?P<cycles>\d{1,20}) cycles"
    r"(?:, exposed communication (?P<exposed>\d{1,20}) cycles)?"
)
_NAMED = re.compile(r"sys(?:\[|\.id=|->id=)(?P<rank>\d{1,9})\b")
_UNFINISHED = re.compile(r"unreleased nodes|did not finish")
_CRITICAL = "[critical]"
# LogGOPSim: up to 16 hosts each, beyond that the last one
_HOST = re.compile(
    r"^(?:Host|Maximum finishing time at host) (?P<rank>\d{1,9}): (?P<cycles>\d{1,20})(?: \(.*\))?$", re.MULTILINE
)
_UNMATCHED = re.compile(r"^(?:unexpected|receive) queue on host (?P<rank>\d{1,9}) contains \d+ elements", re.MULTILINE)
_HOSTS = re.compile(r"\bsize: (?P<count>\d{1,9}) \(\d+ CPUs")

# Tables of ASTRA-sim 1.0 (CSVWriter.cc), without quotes; the first line names the columns but those of layer and run
_LAYER_COLUMNS = {
    "fwd compute": "fwd_pass_compute", "wg compute": "weight_grad_compute", "ig compute": "input_grad_compute",
    "fwd exposed comm": "idle_waiting_for_fwd_finish", "wg exposed comm": "idle_waiting_for_weight_grad_finish",
    "ig exposed comm": "idle_waiting_for_input_grad_finish", "fwd total comm": "fwd_pass_comm",
    "wg total comm": "weight_grad_comm", "ig total comm": "input_grad_comm",
}  # fmt: skip
_PHASE = re.compile(r"(?:queuing|network) delay phase \d{1,9}")
_CHUNK = re.compile(r"avg chunk delay dimension (?P<dimension>\d{1,9})")
# (column, key, factor) of tutorial_result.csv and backend_end_to_end.csv; CommsTime is the time of the whole run
_RUN_COLUMNS = (
    ("TotalTime(us)", "cycles", _CYCLES_PER_US), ("CommsTime", "cycles", _CYCLES_PER_US),
    ("ComputeTime(us)", "compute_cycles", _CYCLES_PER_US), ("ComputeTime", "compute_cycles", _CYCLES_PER_US),
    ("ExposedCommunicationTime(us)", "exposed_communication_cycles", _CYCLES_PER_US),
    ("ExposedCommsTime", "exposed_communication_cycles", _CYCLES_PER_US),
    ("TotalMessageSize(MB)", "message_bytes", 2**20), ("TotalPayloadSize", "message_bytes", 2**20),
)  # fmt: skip
_MAX_LINE, _SHOWN = 200, 8  # of messages: characters of a line, and ranks
_MAX_CELL = 9e15  # integers beyond are not exact


@dataclass
class SimulatorLog:
    """The result of another simulator.

    Attributes:
        simulator: name and version.
        cycles: time until the end; 1 cycle is 1 ns; None if the file does not have it, or has several.
        size: number of ranks of the run, None if the file does not say it.
        layers: layer -> what -> cycles, of ASTRA-sim 1.0.
        ranks: rank -> cycles and exposed communication, of ASTRA-sim 2.x and LogGOPSim.
        runs: run -> what -> cycles or bytes, of tables with several runs.
        dimensions: run, dimension and its mean time of a chunk, of ASTRA-sim 1.0.
        warnings: what the log says against the result, one sentence each.
    """

    simulator: str
    cycles: int | None
    size: int | None = None
    layers: dict[str, dict[str, int]] = field(default_factory=dict)
    ranks: dict[int, dict[str, int | None]] = field(default_factory=dict)
    runs: dict[str, dict[str, int]] = field(default_factory=dict)
    dimensions: list[dict[str, str | int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def check_ranks(self, ranks: int, added: int, name: str) -> None:
        """Check that the ranks of a workload are those that finished.

        Args:
            ranks: number of ranks of the workload.
            added: servers or switches that may be further ranks.
            name: the run in messages.

        Raises:
            UsageError: there are fewer ranks in the file, or more.
        """
        if self.size is None or ranks <= self.size <= ranks + added:
            return
        why = f"it has {counted(self.size, 'rank')}, and the workload has {ranks:,}"
        if self.size > ranks:
            raise UsageError(f"{name} is of another workload: {why}")
        missing = _ranks(range(self.size, ranks), ranks - self.size)
        raise UsageError(f"{name}: {missing} did not finish, or it is of another workload: {why}")

    def check_chain(self, chain_ns: int) -> None:
        """Warn if the run ended before the longest chain of computations and messages of its workload can."""
        if self.cycles is not None and self.cycles < chain_ns:
            self.warnings.append(
                f"{self.simulator} ended after {self.cycles / 1e6:.6g} ms, but the longest chain of computations and "
                f"messages of the workload takes {chain_ns / 1e6:.6g} ms or more: it ran without some dependencies, or "
                "on another network"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "simulator": self.simulator,
            "cycles": self.cycles,
            "layers": [{"name": name, **values} for name, values in self.layers.items()],
            "ranks": [{"rank": rank, **values} for rank, values in sorted(self.ranks.items())],
            "runs": [{"name": name, **values} for name, values in self.runs.items()],
            "dimensions": self.dimensions,
            "warnings": self.warnings,
        }

    def sentence(self, iteration_s: float | None = None) -> str:
        """Return the time in words, beside that of the simulation here if it is given."""
        here = "" if iteration_s is None else f"beside {1e3 * iteration_s:.6g} ms in ringtap"
        if self.cycles is None:
            return f"{self.simulator}, without a time until the end" + (here and f", {here}")
        text = f"{self.cycles:,} cycles ({self.cycles / 1e6:g} ms at 1 ns per cycle) in {self.simulator}"
        change = f"{round(self.cycles / 1e9 / iteration_s - 1, 3) + 0:+.1%} " if iteration_s else ""
        return text + (here and f", {change}{here}")


def _ranks(ranks: Iterable[int], count: int) -> str:
    """Return the first ones of some ranks in words: ``ranks 1, 2 and 7``."""
    shown = [str(rank) for rank in islice(ranks, _SHOWN)]
    if count > len(shown):
        shown.append(f"{count - len(shown):,} more")
    return f"rank {shown[0]}" if count == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def read_log(path: Path, name: str = "") -> SimulatorLog:
    """Read the log of ASTRA-sim 1.0 or 2.x or of LogGOPSim, or a table of ASTRA-sim 1.0.

    Args:
        path: the file.
        name: the run in messages, by default the file.

    Raises:
        UsageError: the file cannot be read, or is no log of a run in which every rank finished.
    """
    name = name or str(path)
    with file_errors(name):
        if path.stat().st_size > MAX_LOG_BYTES:
            raise UsageError(f"{name} has more than {MAX_LOG_BYTES:,} bytes: it is no log of a simulator")
        text = path.read_text(errors="replace")
    if end := _END.search(text):
        found: SimulatorLog | None = _astra1(text, int(end["cycles"]), name)
    elif _RANK.search(text) or _UNFINISHED.search(text):
        found = _astra2(text, name)
    elif _HOST.search(text) or _UNMATCHED.search(text):
        found = _loggopsim(text, name)
    else:
        found = _table(path, text)
    if found is None:
        raise UsageError(
            f"{name} is no log of a finished run of ASTRA-sim or LogGOPSim: neither 'all passes finished at time' "
            "(1.0) nor 'sys[0] finished' (2.x) nor 'Host 0:' (LogGOPSim) is in it, nor is it a table of ASTRA-sim 1.0"
        )
    return found


def _unfinished(name: str, why: str) -> UsageError:
    return UsageError(f"{name} is of a run that did not finish, and so has no time of the workload: {why}")


def _check_all(found: SimulatorLog, size: int, name: str) -> None:
    if len(found.ranks) < size:
        missing = (rank for rank in range(size) if rank not in found.ranks)
        raise _unfinished(name, f"{_ranks(missing, size - len(found.ranks))} of {size:,} did not finish")


def _line_at(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 :][:_MAX_LINE].partition("\n")[0].strip()


def _astra1(text: str, cycles: int, name: str) -> SimulatorLog:
    nodes = _NODES.search(text)
    found = SimulatorLog("ASTRA-sim 1.0", cycles, int(nodes["count"]) if nodes else None)
    for value in _VALUE.finditer(text):
        key = value["what"].strip().replace(" ", "_") + "_cycles"
        found.layers.setdefault(value["layer"], {})[key] = 0 if value["cycles"] == "O" else int(value["cycles"])
    streams = {each["what"]: int(each["count"]) for each in _STREAMS.finditer(text)}
    if streams.get("injected") != streams.get("finished"):
        raise _unfinished(name, f"{streams.get('finished')} of {streams.get('injected')} streams of rank 0 finished")
    return found


def _astra2(text: str, name: str) -> SimulatorLog:
    found = SimulatorLog("ASTRA-sim 2.x", None)
    for each in _RANK.finditer(text):
        exposed = None if each["exposed"] is None else int(each["exposed"])
        found.ranks[int(each["rank"])] = {"cycles": int(each["cycles"]), "exposed_communication_cycles": exposed}
    size = 1 + max((int(each["rank"]) for each in _NAMED.finditer(text)), default=-1)
    _check_all(found, size, name)
    if bad := _UNFINISHED.search(text):
        raise _unfinished(name, repr(_line_at(text, bad.start())))
    if _CRITICAL in text:
        found.warnings.append(f"the log has an error: {_line_at(text, text.index(_CRITICAL))!r}")
    found.cycles, found.size = max(int(each["cycles"]) for each in _RANK.finditer(text)), size
    return found


def _loggopsim(text: str, name: str) -> SimulatorLog:
    unmatched = sorted({int(each["rank"]) for each in _UNMATCHED.finditer(text)})
    if unmatched:
        raise _unfinished(name, f"messages of {_ranks(unmatched, len(unmatched))} have no counterpart")
    hosts, size = list(_HOST.finditer(text)), _HOSTS.search(text)
    found = SimulatorLog("LogGOPSim", max(int(each["cycles"]) for each in hosts), int(size["count"]) if size else None)
    found.ranks = {int(each["rank"]): {"cycles": int(each["cycles"])} for each in hosts}
    if not hosts[0][0].startswith("Maximum"):
        found.size = max(found.size or 0, 1 + max(found.ranks))
        _check_all(found, found.size, name)
    return found


class _Table(NamedTuple):
    """A table: its columns, and the cells of each line with something in it."""

    path: Path
    columns: dict[str, int]
    rows: list[tuple[int, list[str]]]

    def text(self, row: tuple[int, list[str]], column: int) -> str:
        """Return a cell, empty if the line is too short."""
        return row[1][column].strip() if column < len(row[1]) else ""

    def number(self, row: tuple[int, list[str]], column: str, factor: int) -> int | None:
        """Return a number of a row, None if its cell is empty or there is no such column."""
        text = self.text(row, self.columns[column]) if column in self.columns else ""
        if not text:
            return None
        try:
            value = float(text) * factor
        except ValueError:
            value = math.nan
        if not abs(value) < _MAX_CELL:
            raise UsageError(f"{self.path} line {row[0]}: {column} {text[:40]!r} is not a number that a table holds")
        return round(value)

    def layers(self) -> Iterator[tuple[tuple[int, list[str]], str, str]]:
        """Yield each row with its layer and run; the layer's name is in its first row only."""
        layer, runs = "", {self.text(row, 1) for row in self.rows}
        for row in self.rows:
            layer, run = self.text(row, 0) or layer, self.text(row, 1)
            yield row, layer if len(runs) < 2 else f"{layer} of {run}", run


def _table(path: Path, text: str) -> SimulatorLog | None:
    """Return the result in a table of ASTRA-sim 1.0, None if the file is no such table."""
    header, *lines = text.split("\n")
    columns: dict[str, int] = {}
    for place, name in enumerate(header.split(",")):
        columns.setdefault(name.strip(), place)
    read = next((read for name, read in _TABLES.items() if name in columns), None)
    if read is None:
        return None
    rows = [(number, line.split(",")) for number, line in enumerate(lines, start=2) if line.strip(", \r")]
    for number, cells in rows:
        check_cells(f"{path} line {number}", cells, header.split(","))
    found = SimulatorLog("ASTRA-sim 1.0", None)
    read(_Table(path, columns, rows), found)
    return found


def _end_to_end(table: _Table, found: SimulatorLog) -> None:
    for row, layer, run in table.layers():
        values = found.layers.setdefault(layer, {})
        for column, what in _LAYER_COLUMNS.items():
            value = table.number(row, column, _CYCLES_PER_US)
            if value is not None:
                values[f"{what}_cycles"] = value
        cycles = table.number(row, "workload finished at", _CYCLES_PER_US)
        if cycles is not None:
            found.runs[run] = {"cycles": max(cycles, found.runs.get(run, {}).get("cycles", 0))}
    _set_cycles(found)


def _phases(table: _Table, found: SimulatorLog) -> None:
    for row, layer, run in table.layers():
        for column in table.columns:
            value = None
            if _PHASE.fullmatch(column) or _CHUNK.fullmatch(column):
                value = table.number(row, column, _CYCLES_PER_US)
            if value is None:
                continue
            if chunk := _CHUNK.fullmatch(column):
                # numbered from 1 here, from 0 in backend_dim_info.csv
                found.dimensions.append({"run": run, "dimension": int(chunk["dimension"]) - 1, "chunk_cycles": value})
            else:
                found.layers.setdefault(layer, {})[f"{column.replace(' ', '_')}_cycles"] = value
    found.warnings.append("the table has no time of the end: EndToEnd.csv of the same run does")


def _chunk_times(table: _Table, found: SimulatorLog) -> None:
    for row in table.rows:
        dimension = table.number(row, "DimensionIndex", 1)
        value = table.number(row, "AverageChunkLatency", _CYCLES_PER_US)
        if dimension is not None and value is not None:
            found.dimensions.append({"run": table.text(row, 0), "dimension": dimension, "chunk_cycles": value})
    found.warnings.append("the table has no time of the end: backend_end_to_end.csv of the same run does")


def _run_times(table: _Table, found: SimulatorLog) -> None:
    for row in table.rows:
        values = {
            key: table.number(row, column, factor) for column, key, factor in _RUN_COLUMNS if column in table.columns
        }
        found.runs[table.text(row, 0)] = {key: value for key, value in values.items() if value is not None}
    _set_cycles(found)


def _set_cycles(found: SimulatorLog) -> None:
    if len(found.runs) == 1:
        found.cycles = next(iter(found.runs.values())).get("cycles")
    else:
        found.warnings.append(f"the table has {counted(len(found.runs), 'run')}, and so no single time")


# a column that no other table has -> reader
_TABLES: dict[str, Callable[[_Table, SimulatorLog], None]] = {
    "workload finished at": _end_to_end, "queuing delay phase 0": _phases, "network delay phase 1": _phases,
    "avg chunk delay dimension 1": _phases,
    "DimensionIndex": _chunk_times, "TotalTime(us)": _run_times, "ExposedCommsTime": _run_times,
}  # fmt: skip
