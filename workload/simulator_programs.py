"""Runs of ASTRA-sim and LogGOPSim: a workload is exported, the program runs on it, and its result is read."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ringtap.errors import UsageError
from ringtap.units import counted, format_duration
from ringtap.workload.astra_sim import CONFIGURATION, write_astra_sim
from ringtap.workload.export import goal
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.simulator_logs import SimulatorLog, read_log
from ringtap.workload.topologies import Topology
from ringtap.workload.workload import PREFIX, Workload, check_workload

_TXT2BIN = "txt2bin"  # LogGOPSim's converter of schedules
# LogGOPSim's parameters are whole numbers of 32 bits, so that its unit of time is 1 ps here
_PS_PER_S, _MAX_PARAMETER = 10**12, 2**31 - 1
_PS_PER_CYCLE = 1000
_MAX_LINE = 200


def run_simulator(
    name: str,
    program: Path,
    workload: Workload,
    topology: Topology,
    algorithms: Algorithms,
    latency_s: float,
    limit_s: float,
) -> SimulatorLog:
    """Run an iteration of a workload in another simulator.

    Args:
        name: ``astra-sim`` or ``loggopsim``.
        program: the program: ASTRA-sim's analytical backend, or LogGOPSim with ``txt2bin`` beside it.
        workload: what ranks compute and send.
        topology: the network.
        algorithms: algorithms of collectives.
        latency_s: time of a message beside its bytes.
        limit_s: time after which the program is ended.

    Raises:
        UsageError: the workload or the topology cannot be exported, or the program does not run to a result.
    """
    prepare = _astra_sim if name == "astra-sim" else _loggopsim
    with TemporaryDirectory(prefix="ringtap-") as temporary:
        folder = Path(temporary) / "run"
        for command in prepare(program.resolve(), folder, workload, topology, algorithms, latency_s):
            output = _run(command, folder, limit_s)
        try:
            found = read_log(output)
        except UsageError as error:
            raise UsageError(f"{program} printed no result: {_last_line(output)}") from error
    if found.warnings:
        raise UsageError(f"{program}: {found.warnings[0]}")
    if name == "astra-sim" and len(found.ranks) < workload.ranks:
        raise UsageError(f"{program}: {len(found.ranks)} of {counted(workload.ranks, 'rank')} finished")
    return found if name == "astra-sim" else _in_cycles(found)


def _astra_sim(
    program: Path, folder: Path, workload: Workload, topology: Topology, algorithms: Algorithms, latency_s: float
) -> list[list[str]]:
    write_astra_sim(workload, topology, algorithms.all_reduce, latency_s, folder)
    # relative names: the simulator takes a name with "empty" in it for no file
    arguments = [f"--workload-configuration={PREFIX}"]
    arguments += [f"--{option}-configuration={file}" for option, file in CONFIGURATION.items()]
    return [[str(program), *arguments]]


def _loggopsim(
    program: Path, folder: Path, workload: Workload, topology: Topology, algorithms: Algorithms, latency_s: float
) -> list[list[str]]:
    if topology.name != "star":
        raise UsageError("LogGOPSim has the same rate between all hosts: choose --topology star")
    parameters = {"L": round(latency_s * _PS_PER_S), "G": round(8 * _PS_PER_S / topology.rate_bps[0])}
    if not 1 <= parameters["G"] <= _MAX_PARAMETER or parameters["L"] > _MAX_PARAMETER:
        raise UsageError("LogGOPSim runs rates of 4 kbit/s to 8 Tbit/s and latencies up to 2.1 ms here")
    # no time of the processor or between messages, and no handshake (S), as in the simulation here
    parameters |= {"o": 0, "g": 0, "O": 0, "S": _MAX_PARAMETER}
    lowered = lower(workload, algorithms)
    check_workload(lowered)
    folder.mkdir()
    with (folder / "schedule.goal").open("w") as file:
        file.writelines(f"{line}\n" for line in goal(lowered, _PS_PER_S // 10**6))
    options = [word for name, value in parameters.items() for word in (f"-{name}", str(value))]
    return [
        [str(program.with_name(_TXT2BIN)), "-i", "schedule.goal", "-o", "schedule.bin"],
        [str(program), "-f", "schedule.bin", *options],
    ]


def _in_cycles(found: SimulatorLog) -> SimulatorLog:
    """Return a result in ps as one in cycles of 1 ns."""
    found.cycles = round((found.cycles or 0) / _PS_PER_CYCLE)
    for values in found.ranks.values():
        values["cycles"] = round((values["cycles"] or 0) / _PS_PER_CYCLE)
    return found


def _run(command: Sequence[str], folder: Path, limit_s: float) -> Path:
    """Run a program in a folder, and return the file with what it printed."""
    output = folder / "output.log"
    with output.open("wb") as file:
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False,
                timeout=limit_s,
            )  # fmt: skip
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise UsageError(f"{command[0]} did not end within {format_duration(limit_s)}: see --time-limit") from error
    if done.returncode:
        how = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        raise UsageError(f"{command[0]} failed with {how}: {_last_line(output)}")
    return output


def _last_line(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(output.stat().st_size - 2 * _MAX_LINE, 0))
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return last[:_MAX_LINE]
