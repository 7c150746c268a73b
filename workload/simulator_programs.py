"""Runs ASTRA-sim and LogGOPSim: exports a workload, runs the program on it, and reads its result."""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from ringtap.core.errors import UsageError
from ringtap.core.parent_death import die_with_parent
from ringtap.core.units import format_duration
from ringtap.workload.astra_sim import CONFIGURATION, KINDS, write_astra_sim
from ringtap.workload.export import goal
from ringtap.workload.lowering import Algorithms, bytes_of, data_bytes
from ringtap.workload.message_graph import Integers
from ringtap.workload.simulator_logs import SimulatorLog, read_log
from ringtap.workload.topologies import Topology
from ringtap.workload.workload import (
    PREFIX,
    Parts,
    Place,
    Workload,
    carried_out_as,
    collectives_of,
    length_us,
    senders_of,
    size_of,
    split_bytes,
)

_TXT2BIN = "txt2bin"  # LogGOPSim's converter of schedules
# LogGOPSim's parameters are whole numbers of 32 bits, so that its unit of time is 1 ps here
_PS_PER_S, _MAX_PARAMETER = 10**12, 2**31 - 1
_PS_PER_CYCLE = 1000
_MAX_LINE = 200
_ROUNDING = 1e-9  # of the numbers that simulators read


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
        commands, least_ns = prepare(program.resolve(), folder, workload, topology, algorithms, latency_s)
        for command in commands:
            output = _run(command, folder, limit_s)
        log = f"the output of {program}"
        try:
            found = read_log(output, log)
        except UsageError as error:
            raise UsageError(f"{error}; its last line: {_last_line(output)}") from error
    if found.warnings:
        raise UsageError(f"{program}: {found.warnings[0]}")
    found.check_ranks(workload.ranks, algorithms.others if name == "loggopsim" else 0, log)
    if name == "loggopsim":
        _to_cycles(found)
    found.check_chain(least_ns)
    return found


def longest_chain_ns(
    workload: Workload, rate_bps: float, latency_s: float, algorithms: Algorithms | None = None
) -> int:
    """Return the time of the longest chain of computations and messages, which no simulation can go below.

    Args:
        workload: what ranks compute and send.
        rate_bps: rate of the fastest link.
        latency_s: time of a message beside its bytes.
        algorithms: algorithms of collectives. None: they are not known. A collective in which each rank needs data of
            all others counts as one message to it then, with the part of one rank, after these have begun; others take
            no time.
    """

    def message_ns(size_bytes: Integers) -> Integers:  # LogGOPSim charges the bytes after the first
        times_ns = (latency_s * 1e9 + np.maximum(size_bytes - 1, 0) * 8e9 / rate_bps) * (1 - _ROUNDING)
        return times_ns.astype(np.int64)

    def collective_ends_ns(parts: Parts, ready_ns: Integers) -> Integers:
        """Return when the ranks of a collective have ended it, from the times at which they begin."""
        kind, size_bytes = carried_out_as(parts[0][1]), bytes_of(parts)
        if algorithms is not None and len(parts) > 1:
            graph = algorithms.graph(kind, len(parts), size_bytes, split_bytes(parts))
            others = np.zeros(graph.endpoints - len(parts), np.int64)
            return graph.end_ns(np.concatenate([ready_ns, others]), message_ns(graph.size_bytes))
        if kind not in KINDS or len(parts) == 1:
            return ready_ns
        last = np.full(len(parts), ready_ns.max())  # of the others: the last rank can have what they sent before
        last[ready_ns.argmax()] = np.partition(ready_ns, -2)[-2]
        share_bytes = np.array(data_bytes(parts[0][1], len(parts)) // len(parts))
        return np.maximum(ready_ns, last + message_ns(share_bytes))

    collectives: dict[Place, Parts] = {}  # by the first part, for which the others stand
    first: dict[Place, Place] = {}
    for parts in collectives_of(workload):
        places = [(rank, node.id) for rank, node in parts]
        first |= dict.fromkeys(places, places[0])
        collectives[places[0]] = parts
    nodes = {(rank, node.id): node for rank, trace in enumerate(workload.traces) for node in trace}
    sender_of = senders_of(workload)
    waits = defaultdict[Place, set[Place]](set)
    for place, node in nodes.items():
        before = {(place[0], dep) for dep in node.deps} | ({sender_of[place]} if place in sender_of else set())
        waits[first.get(place, place)].update(first.get(each, each) for each in before)
    ends_ns: dict[Place, int] = {}

    def ready_ns(place: Place) -> int:
        return max((ends_ns[place[0], dep] for dep in nodes[place].deps), default=0)

    for place in TopologicalSorter(waits).static_order():
        node = nodes[place]
        if place in collectives:
            places = [(rank, each.id) for rank, each in collectives[place]]
            ended_ns = collective_ends_ns(collectives[place], np.array([ready_ns(each) for each in places]))
            ends_ns |= zip(places, ended_ns.tolist(), strict=False)
        elif place in sender_of:
            source = sender_of[place]
            sent_ns = ends_ns[source] + int(message_ns(np.array(size_of(nodes[source]))))
            ends_ns[place] = max(ready_ns(place), sent_ns)
        else:
            ends_ns[place] = ready_ns(place) + length_us(node) * 1000
    return max(ends_ns.values(), default=0)


def _astra_sim(
    program: Path, folder: Path, workload: Workload, topology: Topology, algorithms: Algorithms, latency_s: float
) -> tuple[list[list[str]], int]:
    write_astra_sim(workload, topology, algorithms.all_reduce, latency_s, folder)
    # relative names: the simulator takes a name with "empty" in it for no file
    arguments = [f"--workload-configuration={PREFIX}"]
    arguments += [f"--{option}-configuration={file}" for option, file in CONFIGURATION.items()]
    return [[str(program), *arguments]], longest_chain_ns(workload, max(topology.rate_bps), latency_s)


def _loggopsim(
    program: Path, folder: Path, workload: Workload, topology: Topology, algorithms: Algorithms, latency_s: float
) -> tuple[list[list[str]], int]:
    if topology.name != "star":
        raise UsageError("LogGOPSim has the same rate between all hosts: choose --topology star")
    parameters = {"L": round(latency_s * _PS_PER_S), "G": round(8 * _PS_PER_S / topology.rate_bps[0])}
    if not 1 <= parameters["G"] <= _MAX_PARAMETER or parameters["L"] > _MAX_PARAMETER:
        raise UsageError("LogGOPSim runs rates of 4 kbit/s to 8 Tbit/s and latencies up to 2.1 ms here")
    # no time of the processor or between messages, and no handshake (S), as in the simulation here
    parameters |= {"o": 0, "g": 0, "O": 0, "S": _MAX_PARAMETER}
    folder.mkdir()
    with (folder / "schedule.goal").open("w") as file:
        file.writelines(f"{line}\n" for line in goal(workload, algorithms, _PS_PER_S // 10**6))
    options = [word for name, value in parameters.items() for word in (f"-{name}", str(value))]
    commands = [
        [str(program.with_name(_TXT2BIN)), "-i", "schedule.goal", "-o", "schedule.bin"],
        [str(program), "-f", "schedule.bin", *options],
    ]
    return commands, longest_chain_ns(workload, 8 * _PS_PER_S / parameters["G"], latency_s, algorithms)


def _to_cycles(found: SimulatorLog) -> None:
    """Turn a result in ps into one in cycles of 1 ns."""
    found.cycles = round((found.cycles or 0) / _PS_PER_CYCLE)
    for values in found.ranks.values():
        values["cycles"] = round((values["cycles"] or 0) / _PS_PER_CYCLE)


def _run(command: Sequence[str], folder: Path, limit_s: float) -> Path:
    """Run a program in a folder, and return the file with what it printed."""
    output = folder / "output.log"
    with output.open("wb") as file:
        try:
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False,
                timeout=limit_s, preexec_fn=die_with_parent(),
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
