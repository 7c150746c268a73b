"""Logs and tables of other simulators: the time that they found, and what each layer cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.csv_table import check_cells
from ringtap.errors import UsageError
from ringtap.units import counted

MAX_LOG_BYTES = 2**30
_CYCLES_PER_US = 1000  # 1 cycle is 1 ns; tables of ASTRA-sim 1.0 are in us
# ASTRA-sim 1.0 prints several values in one line, and the letter O in some copies of its logs
_VALUE = re.compile(r"id: (?P<layer>[^,\n]*?) ,Total cycles spent (?:on )?(?P<what>[a-z ]+?): (?P<cycles>\d{1,20}|O)\b")
_END = re.compile(r"all passes finished at time: (?P<cycles>\d{1,20})\b")
_STREAMS = re.compile(r"Total streams (?P<what>injected|finished): (?P<count>\d{1,20})\b")
# ASTRA-sim 2.x
_RANK = re.compile(
    r"sys\[(?P<rank>\d{1,9})\] finished, (?P<cycles>\d{1,20}) cycles"
    r"(?:, exposed communication (?P<exposed>\d{1,20}) cycles)?"
)
_UNRELEASED = re.compile(r"unreleased nodes|\[critical\]")
# LogGOPSim: up to 16 hosts each, beyond that the last one
_HOST = re.compile(
    r"^(?:Host|Maximum finishing time at host) (?P<rank>\d{1,9}): (?P<cycles>\d{1,20})(?: \(.*\))?$", re.MULTILINE
)
_UNMATCHED = re.compile(r"^(?:unexpected|receive) queue on host \d+ contains \d+ elements", re.MULTILINE)

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
_MAX_CELL = 9e15  # integers beyond are not exact


@dataclass
class SimulatorLog:
    """The result of another simulator.

    Attributes:
        simulator: name and version.
        cycles: time until the end; 1 cycle is 1 ns; None if the file does not have it, or has several.
        layers: layer -> what -> cycles, of ASTRA-sim 1.0.
        ranks: rank -> cycles and exposed communication, of ASTRA-sim 2.x and LogGOPSim.
        runs: run -> what -> cycles or bytes, of tables with several runs.
        dimensions: run, dimension and its mean time of a chunk, of ASTRA-sim 1.0.
        warnings: what the log says against the result, one sentence each.
    """

    simulator: str
    cycles: int | None
    layers: dict[str, dict[str, int]] = field(default_factory=dict)
    ranks: dict[int, dict[str, int | None]] = field(default_factory=dict)
    runs: dict[str, dict[str, int]] = field(default_factory=dict)
    dimensions: list[dict[str, str | int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

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


def read_log(path: Path) -> SimulatorLog:
    """Read the log of ASTRA-sim 1.0 or 2.x or of LogGOPSim, or a table of ASTRA-sim 1.0.

    Raises:
        UsageError: the file cannot be read, or is no log of a finished run.
    """
    try:
        if path.stat().st_size > MAX_LOG_BYTES:
            raise UsageError(f"{path} has more than {MAX_LOG_BYTES:,} bytes: it is no log of a simulator")
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if end := _END.search(text):
        return _astra1(text, int(end["cycles"]))
    if ranks := list(_RANK.finditer(text)):
        return _astra2(text, ranks)
    if hosts := list(_HOST.finditer(text)):
        return _loggopsim(text, hosts)
    if found := _table(path, text):
        return found
    if unmatched := _UNMATCHED.search(text):
        raise UsageError(f"{path} is of a run that did not finish: {unmatched[0]} that no rank matches")
    raise UsageError(
        f"{path} is no log of a finished run of ASTRA-sim or LogGOPSim: neither 'all passes finished at time' (1.0) "
        "nor 'sys[0] finished' (2.x) nor 'Host 0:' (LogGOPSim) is in it, nor is it a table of ASTRA-sim 1.0"
    )


def _astra1(text: str, cycles: int) -> SimulatorLog:
    found = SimulatorLog("ASTRA-sim 1.0", cycles)
    for value in _VALUE.finditer(text):
        key = value["what"].strip().replace(" ", "_") + "_cycles"
        found.layers.setdefault(value["layer"], {})[key] = 0 if value["cycles"] == "O" else int(value["cycles"])
    streams = {each["what"]: int(each["count"]) for each in _STREAMS.finditer(text)}
    if streams.get("injected") != streams.get("finished"):
        found.warnings.append(f"{streams.get('finished')} of {streams.get('injected')} streams finished")
    return found


def _astra2(text: str, ranks: list[re.Match[str]]) -> SimulatorLog:
    found = SimulatorLog("ASTRA-sim 2.x", max(int(each["cycles"]) for each in ranks))
    for each in ranks:
        exposed = None if each["exposed"] is None else int(each["exposed"])
        found.ranks[int(each["rank"])] = {"cycles": int(each["cycles"]), "exposed_communication_cycles": exposed}
    if bad := _UNRELEASED.search(text):
        found.warnings.append(f"the log has {bad[0]!r}: some nodes never ran, and the time is not that of the workload")
    return found


def _loggopsim(text: str, hosts: list[re.Match[str]]) -> SimulatorLog:
    found = SimulatorLog("LogGOPSim", max(int(each["cycles"]) for each in hosts))
    found.ranks = {int(each["rank"]): {"cycles": int(each["cycles"])} for each in hosts}
    if unmatched := _UNMATCHED.search(text):
        found.warnings.append(f"{unmatched[0]} that no rank matches")
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
        """Return a number of a row, None if its cell is empty."""
        text = self.text(row, self.columns[column])
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
    return read(_Table(path, columns, rows))


def _end_to_end(table: _Table) -> SimulatorLog:
    found = SimulatorLog("ASTRA-sim 1.0", None)
    for row, layer, run in table.layers():
        values = found.layers.setdefault(layer, {})
        for column, what in _LAYER_COLUMNS.items():
            value = table.number(row, column, _CYCLES_PER_US) if column in table.columns else None
            if value is not None:
                values[f"{what}_cycles"] = value
        cycles = table.number(row, "workload finished at", _CYCLES_PER_US)
        if cycles is not None:
            found.runs[run] = {"cycles": max(cycles, found.runs.get(run, {}).get("cycles", 0))}
    return _with_cycles(found)


def _phases(table: _Table) -> SimulatorLog:
    found = SimulatorLog("ASTRA-sim 1.0", None)
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
    return found


def _chunk_times(table: _Table) -> SimulatorLog:
    found = SimulatorLog("ASTRA-sim 1.0", None)
    for row in table.rows:
        dimension = table.number(row, "DimensionIndex", 1)
        value = (
            table.number(row, "AverageChunkLatency", _CYCLES_PER_US) if "AverageChunkLatency" in table.columns else None
        )
        if dimension is not None and value is not None:
            found.dimensions.append({"run": table.text(row, 0), "dimension": dimension, "chunk_cycles": value})
    found.warnings.append("the table has no time of the end: backend_end_to_end.csv of the same run does")
    return found


def _run_times(table: _Table) -> SimulatorLog:
    found = SimulatorLog("ASTRA-sim 1.0", None)
    for row in table.rows:
        values = {
            key: table.number(row, column, factor) for column, key, factor in _RUN_COLUMNS if column in table.columns
        }
        found.runs[table.text(row, 0)] = {key: value for key, value in values.items() if value is not None}
    return _with_cycles(found)


def _with_cycles(found: SimulatorLog) -> SimulatorLog:
    if len(found.runs) == 1:
        found.cycles = next(iter(found.runs.values())).get("cycles")
    else:
        found.warnings.append(f"the table has {counted(len(found.runs), 'run')}, and so no single time")
    return found


# a column that no other table has -> reader
_TABLES: dict[str, Callable[[_Table], SimulatorLog]] = {
    "workload finished at": _end_to_end, "queuing delay phase 0": _phases, "network delay phase 1": _phases,
    "avg chunk delay dimension 1": _phases,
    "DimensionIndex": _chunk_times, "TotalTime(us)": _run_times, "ExposedCommsTime": _run_times,
}  # fmt: skip
