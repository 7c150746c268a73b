"""Logs of other simulators: the time that they found, and what each layer cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError

MAX_LOG_BYTES = 2**30
# ASTRA-sim 1.0 prints several values in one line, and the letter O in some copies of its logs
_VALUE = re.compile(r"id: (?P<layer>[^,\n]*?) ,Total cycles spent (?:on )?(?P<what>[a-z ]+?): (?P<cycles>\d+|O)\b")
_END = re.compile(r"all passes finished at time: (?P<cycles>\d+)")
_STREAMS = re.compile(r"Total streams (?P<what>injected|finished): (?P<count>\d+)")
# ASTRA-sim 2.x
_RANK = re.compile(
    r"sys\[(?P<rank>\d+)\] finished, (?P<cycles>\d+) cycles(?:, exposed communication (?P<exposed>\d+) cycles)?"
)
_UNRELEASED = re.compile(r"unreleased nodes|\[critical\]")


@dataclass
class SimulatorLog:
    """The result of another simulator.

    Attributes:
        simulator: name and version.
        cycles: time until the end; 1 cycle is 1 ns.
        layers: layer -> what -> cycles, of ASTRA-sim 1.0.
        ranks: rank -> cycles and exposed communication, of ASTRA-sim 2.x.
        warnings: what the log says against the result, one sentence each.
    """

    simulator: str
    cycles: int
    layers: dict[str, dict[str, int]] = field(default_factory=dict)
    ranks: dict[int, dict[str, int | None]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "simulator": self.simulator,
            "cycles": self.cycles,
            "layers": [{"name": name, **values} for name, values in self.layers.items()],
            "ranks": [{"rank": rank, **values} for rank, values in sorted(self.ranks.items())],
            "warnings": self.warnings,
        }


def read_log(path: Path) -> SimulatorLog:
    """Read the log of ASTRA-sim 1.0 or 2.x.

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
    raise UsageError(
        f"{path} is no log of a finished run of ASTRA-sim: neither 'all passes finished at time' (1.0) nor "
        "'sys[0] finished' (2.x) is in it"
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
