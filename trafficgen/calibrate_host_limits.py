"""Measures the limits of this host for ``ringtap traffic calibrate``, and saves them for ``send`` and sweeps."""

from __future__ import annotations

import json
import os
import platform
import select
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.flow_plan_file import PlanFile, write_plan
from ringtap.core.installation import cache_folder
from ringtap.core.json_validation import ShapeError, load_json
from ringtap.core.run_directory import write_json
from ringtap.core.terminal_escaping import as_command
from ringtap.core.units import counted, format_rate
from ringtap.trafficgen.plans.registry import make_plan
from ringtap.trafficgen.receiver.receiver import ReceiveOptions, Receiver
from ringtap.trafficgen.sender.options import SendOptions
from ringtap.trafficgen.sender.sender import Sender
from ringtap.trafficgen.statistics import LogHistogram
from ringtap.trafficgen.worker_processes import WorkerProcesses

VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """The calibrated limits of a host.

    Attributes:
        host: the host for which they are valid: host name, kernel, Python, processors.
        measured_unix_s: time of the measurement.
        method: the faster send method.
        ceiling_bps: payload rate of long flows over loopback, sent by that method.
        methods_bps: the same rate for each method.
        kept_flows_per_s: flows of 1 kB on kept connections.
        new_flows_per_s: flows of 1 kB, each on a new connection.
        spin_ns: time before a flow is due at which a launcher with a processor of its own stops sleeping.
        sleep_p50_us: lateness of the ends of sleeps while long flows run, median.
        sleep_p99_us: the same, 99th percentile.
        lateness_p50_us: launch lateness on the idle host, median.
        lateness_p99_us: the same, 99th percentile.
        lateness_busy_p50_us: launch lateness while long flows run as fast as they can, median.
        lateness_busy_p99_us: the same, 99th percentile.
    """

    host: dict[str, Any]
    measured_unix_s: float
    method: Literal["send", "sendfile"]
    ceiling_bps: float
    methods_bps: dict[str, float]
    kept_flows_per_s: float
    new_flows_per_s: float
    spin_ns: int
    sleep_p50_us: float
    sleep_p99_us: float
    lateness_p50_us: float
    lateness_p99_us: float
    lateness_busy_p50_us: float
    lateness_busy_p99_us: float

    def spin_for(self, own_processor: bool) -> int:
        """Return how long before a flow the launcher starts to poll the clock, in ns; shorter on a shared processor."""
        return self.spin_ns if own_processor else min(self.spin_ns, round(self.sleep_p50_us * 1e3))

    def applied_to(self, options: SendOptions) -> SendOptions:
        """Return the options with the send method and the polling time that suit this host."""
        spin_ns = self.spin_for(own_processor=options.launcher_cpu is not None)
        return replace(options, spin_ns=spin_ns, method=self.method)

    def doubt(self, sender: Sender) -> str:
        """Return a sentence if a sender's plan is beyond these limits; empty if it is not."""
        excess = self.exceeded_by(sender.load_bps, sender.flows_per_s, sender.options.connections == "new")
        return f"{excess}, as calibrated; flows will be late" if excess else ""

    def exceeded_by(self, load_bps: float, flows_per_s: float, new_connections: bool) -> str:
        """Return a text about the first of these limits that a plan exceeds; empty if it exceeds none."""
        if load_bps > self.ceiling_bps:
            return f"{format_rate(load_bps)} is above this host's ceiling of {format_rate(self.ceiling_bps)}"
        most = self.new_flows_per_s if new_connections else self.kept_flows_per_s
        if flows_per_s > most:
            return f"{flows_per_s:.0f} flows a second are above this host's ceiling of {most:.0f}"
        return ""


def this_host() -> dict[str, Any]:
    """Return the properties of this host for which a calibration is valid."""
    return {
        "name": platform.node(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
    }


def usual_path() -> Path:
    """Return the default file: in the user's cache folder, named after the host, since hosts may share a home."""
    return cache_folder() / f"calibration-{platform.node()}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration atomically.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"version": VERSION, **asdict(calibration)})
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name another file with -o") from error


_SHAPE = {"version": int, "host": dict, "method": str, "methods_bps": {str: float}, str: float}


def load(path: Path | None = None) -> Calibration | None:
    """Read this host's calibration; None if there is none, or it is for another host, kernel, Python or CPU count."""
    try:
        found = load_json(path or usual_path(), _SHAPE)
        if found.pop("version") != VERSION or found["host"] != this_host():
            return None
        return Calibration(**found)
    except (OSError, ShapeError, TypeError):
        return None


_PATIENCE_S = 5.0
_SLEEP_NS = 1_000_000
_SLEEPS = 2000
_STREAM_NS = 700_000_000
_ROUNDS, CLEARLY = 2, 1.1
_SMALL_NS = 1_000_000_000
_FLOW_BYTES = 1000
_KEPT_OFFERED, _NEW_OFFERED = 40_000, 12_000  # flows per second: more than the host can finish, without overloading it
_LATE_RATE, _LATE_BYTES = 500, 10_000
# Limits of the time for which the launcher polls the clock: a longer time would use a processor for little gain
_MIN_SPIN_NS, _MAX_SPIN_NS = 50_000, 200_000


def calibrate(say: Callable[[str], None] = lambda _: None, until: Connection | None = None) -> Calibration:
    """Measure this host.

    Args:
        say: called with a description of each measurement.
        until: pipe to a parent process, whose end also ends the measurement; None: only signals end it.

    Raises:
        MeasurementError: flows failed over loopback, or a process did not answer.
    """
    with tempfile.TemporaryDirectory() as folder, WorkerProcesses(until) as processes:
        processes.start(_serve)
        address = _message(processes, "the receiver")
        bench = _Bench(Path(folder), address, SendOptions(), until)
        say("throughput by send method, and how late sleeps end beside it")
        processes.start(_sleep)
        methods: dict[Literal["send", "sendfile"], float] = {"send": 0.0, "sendfile": 0.0}
        for _ in range(_ROUNDS):
            for name, before in methods.items():
                methods[name] = max(before, bench.stream_bps(name))
        # The difference must be larger than random variation
        method: Literal["send", "sendfile"] = "sendfile" if methods["sendfile"] > CLEARLY * methods["send"] else "send"
        sleeps: LogHistogram = _message(processes, "the process that sleeps")
        spin_ns = int(min(_MAX_SPIN_NS, max(_MIN_SPIN_NS, sleeps.quantile(0.99) or 0)))
        bench = _Bench(Path(folder), address, SendOptions(spin_ns=spin_ns), until)
        say("flows a second")
        kept = bench.flows_per_s("kept", _KEPT_OFFERED)
        new = bench.flows_per_s("new", _NEW_OFFERED)
        say("launch lateness")
        idle, busy = bench.lateness(bulk=0), bench.lateness(bulk=1)
    return Calibration(
        host=this_host(),
        measured_unix_s=time.time(),
        method=method,
        ceiling_bps=methods[method],
        methods_bps={str(name): rate for name, rate in methods.items()},
        kept_flows_per_s=kept,
        new_flows_per_s=new,
        spin_ns=spin_ns,
        sleep_p50_us=(sleeps.quantile(0.5) or 0) / 1e3,
        sleep_p99_us=(sleeps.quantile(0.99) or 0) / 1e3,
        lateness_p50_us=idle["lateness_p50_us"],
        lateness_p99_us=idle["lateness_p99_us"],
        lateness_busy_p50_us=busy["lateness_p50_us"],
        lateness_busy_p99_us=busy["lateness_p99_us"],
    )


def _message(processes: WorkerProcesses, whose: str) -> Any:
    """Return the next message of a process, of which only this one can send now."""
    message = processes.listen(_PATIENCE_S)
    if message is None and processes.signalled:
        raise KeyboardInterrupt
    if message is None:
        raise MeasurementError(f"calibration: {whose} did not answer within {_PATIENCE_S:g} s")
    return message


class _Bench:
    """Measurements that send plans to a receiver on this host."""

    def __init__(self, folder: Path, address: str, options: SendOptions, until: Connection | None) -> None:
        self._folder, self._address, self._options, self._until = folder, address, options, until

    def stream_bps(self, method: Literal["send", "sendfile"]) -> float:
        """Return the goodput with one long flow per loop."""
        flows = self._options.workers * self._options.threads
        plan = self._write_plan("long-lived", {"duration": _STREAM_NS, "flows": flows})
        return float(self._send(plan, replace(self._options, method=method))["achieved_bps"])

    def flows_per_s(self, connections: Literal["kept", "new"], offered: int) -> float:
        """Return the number of 1 kB flows that finish per second when more are offered."""
        given = {"duration": _SMALL_NS, "load": offered * _FLOW_BYTES * 8, "sizes": f"fixed:{_FLOW_BYTES}B"}
        summary = self._send(self._write_plan("consistent", given), replace(self._options, connections=connections))
        return float(summary["achieved_bps"] / (8 * _FLOW_BYTES))

    def lateness(self, bulk: int) -> dict[str, Any]:
        """Return the summary of small flows that run at the same time as ``bulk`` long ones."""
        given = {"duration": 2 * _STREAM_NS, "load": _LATE_RATE * _LATE_BYTES * 8, "sizes": f"fixed:{_LATE_BYTES}B"}
        plan = self._write_plan("consistent", given)
        if bulk:
            plan = self._with_bulk(plan, bulk)
        return self._send(plan, self._options)

    def _with_bulk(self, plan: Path, bulk: int) -> Path:
        """Write the same plan with open-ended flows added at its beginning; return its path."""
        first_line, _, flows = plan.read_text().partition("\n")
        header = json.loads(first_line)
        header["flows"] += bulk
        path = self._folder / "bulk.plan"
        line = f"0\t-\t{self._address}\t0\t-\n"
        path.write_text(json.dumps(header) + "\n" + line * bulk + flows)
        return path

    def _write_plan(self, kind: str, given: dict[str, Any]) -> Path:
        path = self._folder / f"{kind}.plan"
        write_plan(make_plan(kind, given | {"to": [self._address]}), path, force=True)
        return path

    def _send(self, plan: Path, options: SendOptions) -> dict[str, Any]:
        sender = Sender(PlanFile(plan), options, self._until)
        summary = sender.run()
        if summary["stopped_by"] != "plan":
            raise KeyboardInterrupt
        if summary["failed"] or not summary["finished"]:
            why = sender.first_failure or summary["stopped_by"]
            raise MeasurementError(f"calibration: {counted(summary['failed'], 'flow')} over loopback failed: {why}")
        return summary


def _serve(control: Connection) -> None:
    """Run a receiver on a free port; send its address to ``control``."""
    Receiver(ReceiveOptions(bind="127.0.0.1:0"), control).run()


def _sleep(control: Connection) -> None:
    """Send to ``control`` a log histogram of the lateness, in ns, with which sleeps of 1 ms end."""
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")
    lateness_ns = LogHistogram()
    read_end, write_end = os.pipe()
    for _ in range(_SLEEPS):
        due_ns = time.monotonic_ns() + _SLEEP_NS
        select.select([read_end], (), (), _SLEEP_NS / 1e9)
        lateness_ns.add(time.monotonic_ns() - due_ns)
    os.close(read_end)
    os.close(write_end)
    control.send(lateness_ns)


def calibrated(
    say: Callable[[str], None] = lambda _: None, measure: Callable[[], Calibration] = calibrate
) -> Calibration:
    """Return this host's calibration; if there is none, make one, which takes 10 s.

    Args:
        say: called with a sentence before the measurement.
        measure: measures this host.

    Raises:
        MeasurementError: flows failed over loopback.
    """
    calibration = load()
    if calibration is None:
        say("Calibrating this host's traffic generator, once; takes 10 s")
        calibration = measure()
        with suppress(UsageError):  # if the home directory is not writable, the next run calibrates again
            save(calibration, usual_path())
    return calibration


def main() -> int:
    """Print the calibration as JSON."""
    print(json.dumps(asdict(calibrated())))
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
