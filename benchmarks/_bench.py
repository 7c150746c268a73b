"""Runs a benchmark from its options to its tables: time limit, samples and failures; nothing is left running."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from _machine import CpuTimes, describe
from _processes import BenchmarkError, Processes
from _report import Samples, Table, write

from ringtap.agents.testbed import namespaces
from ringtap.core.errors import RingtapError

# One connection per flow uses up the default port range within seconds; a port can be reused only after a minute.
_SYSCTLS = {"ip_local_port_range": "10000 65000", "tcp_tw_reuse": "1"}


@dataclass
class Bench:
    """One run of a benchmark.

    Attributes:
        options: the command line.
        processes: all processes of the run.
        folder: folder for plans, logs and captures; removed at the end.
        limit_s: time limit of the whole run; None: no limit.
        samples: name of a measure -> its samples, one dictionary each.
        notes: sentences to print with the figures.
        failures: sentences about failed measures.
    """

    options: argparse.Namespace
    processes: Processes
    folder: Path
    limit_s: float | None = None
    samples: Samples = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    begun_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Seconds that the run may still take."""
        return float("inf") if self.limit_s is None else self.begun_s + self.limit_s - time.monotonic()

    def path(self, name: str) -> Path:
        """Return the path of a new file in the run's folder; an old one of this name is removed."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        return path

    @contextlib.contextmanager
    def sample(self, measure: str, **values: Any) -> Iterator[dict[str, Any]]:
        """Take one sample, to which the block adds its figures; a failure is noted, and other measures go on."""
        case = " ".join(f"{key}={value}" for key, value in values.items())
        print(f"{time.monotonic() - self.begun_s:6.1f} s  {measure} {case}", file=sys.stderr, flush=True)
        figures: dict[str, Any] = dict(values)
        before = CpuTimes.now()
        try:
            yield figures
        except BenchmarkError as error:
            self.failures.append(f"{measure} {case}: {error}".replace(" :", ":"))
            return
        except (LookupError, ValueError) as error:  # a command's output lacks a value that this benchmark reads
            self.failures.append(f"{measure} {case}: unexpected output ({type(error).__name__}: {error})")
            return
        figures.setdefault("stolen_pct", before.stolen_pct_since())
        self.samples.setdefault(measure, []).append(figures)

    def rounds(self, tools: Mapping[str, Callable[[int], None]], count: int, reserve: float = 1.0) -> None:
        """Measure tools in turn, every second round in reverse order, so that drift favours none.

        Args:
            tools: takes one sample, given the number of the round.
            count: rounds, of which those are left out that the time may not allow; the first one is always taken.
            reserve: how many times as long as the longest round so far must be left for another one.
        """
        longest_s = 0.0
        for number in range(count):
            begun_s = time.monotonic()
            if number and longest_s * reserve > self.left_s():
                self.notes.append(f"The time of --quick allowed {number} of {count} rounds of {', '.join(tools)}.")
                return
            for measure in reversed(tools.values()) if number % 2 else tools.values():
                measure(number)
            longest_s = max(longest_s, time.monotonic() - begun_s)


def parser_of(text: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks have in common.

    Args:
        text: documentation of the benchmark, of which the first line is shown.
        quick: help of ``--quick``.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write every sample as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    return parser


def run_benchmark(
    options: argparse.Namespace,
    measure: Callable[[Bench], None],
    figures: Callable[[Samples], dict[str, Any]],
    tables: Callable[[Bench], list[Table]],
    limit_s: float | None = None,
    *,
    own_network: bool = False,
) -> int:
    """Measure, print the tables and, last, one JSON object.

    Args:
        options: the command line.
        measure: takes the samples.
        figures: figures of the last line, from the samples.
        tables: tables of the samples.
        limit_s: time limit, which the measures keep to by themselves.
        own_network: enter a network namespace, whose loopback no other program uses.

    Returns:
        The exit code; 1: a measure failed, 130: interrupted.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    before = CpuTimes.now()
    try:
        note = _enter_network() if own_network else ""
        with (
            tempfile.TemporaryDirectory(prefix="ringtap-benchmark-") as folder,
            # a calibration of an own network neither uses nor replaces the user's
            Processes({"XDG_CACHE_HOME": folder} if own_network else {}) as processes,
        ):
            bench = Bench(options, processes, Path(folder), limit_s, notes=[note] if note else [])
            measure(bench)
        machine = describe() | {"stolen_pct": before.stolen_pct_since(), "others_pct": before.others_pct_since()}
        write(machine, options, figures(bench.samples), tables(bench), bench.samples, bench.notes, bench.failures)
        return 1 if bench.failures else 0
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmark: interrupted; nothing was left running", file=sys.stderr)
        return 130


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _enter_network() -> str:
    """Enter a network namespace of loopback alone; return a sentence if the kernel does not allow it."""
    from pyroute2 import IPRoute

    try:
        namespaces.isolate(namespaces.NEWNET)
    except RingtapError as error:
        return f"On the loopback of the machine, which other programs use too: {error}"
    with IPRoute() as link:
        link.link("set", index=1, state="up")
    for name, value in _SYSCTLS.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
    return ""
