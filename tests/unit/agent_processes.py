"""What the tests of the agent share: wrapping a command, finding the agent, reading back what is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from ringtap.core.append_only_logs import open_records

RINGTAP = [sys.executable, "-m", "ringtap.cli"]
ROOT = Path(__file__).resolve().parents[2]
# collectors that every machine has
PLAIN = ("--collect", "nic,steps", "--every", "10ms")


def wrapped(run: Path, *command: str, options: tuple[str, ...] = PLAIN, **keywords: Any) -> subprocess.Popen[str]:
    """``ringtap run`` around a command, with pipes."""
    arguments = [*RINGTAP, "run", "-o", str(run), "--node", "here", *options, "--", *command]
    keywords = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | keywords
    return subprocess.Popen(arguments, **keywords)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def processes_of(run: Path) -> list[psutil.Process]:
    """Every process of ringtap's own that has the run's folder on its command line."""
    found = []
    for pid in psutil.pids():
        # many tests wait for one: without psutil's objects, a look takes half as long
        with contextlib.suppress(OSError, psutil.Error), open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:  # noqa: PTH123
            words = file.read().split(b"\0")
            if os.fsencode(run) in words and b"ringtap.cli" in words:
                process = psutil.Process(pid)
                found += [process] * (process.status() != psutil.STATUS_ZOMBIE)
    return found


def running(word: str) -> list[int]:
    """Processes with a word in their command lines."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if word in " ".join(p.info["cmdline"] or [])]


def agents_of(run: Path) -> list[psutil.Process]:
    """The run's agents, without their short-lived children."""
    found = []
    for process in processes_of(run):
        with contextlib.suppress(OSError, psutil.Error):
            if Path(f"/proc/{process.pid}/comm").read_text() == "ringtap-agent\n":
                found.append((process, process.ppid()))
    pids = {process.pid for process, _ in found}
    return [process for process, parent in found if parent not in pids]


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > deadline:
            raise AssertionError("it did not come about in time")
        time.sleep(0.01)
    return found


def until_recorded(run: Path, jobs: int = 1) -> None:
    """Wait until a run is recorded, and so many jobs are noted in it; a capture may have none."""
    node = run / "nodes" / "here"
    log = node / "nic" / "nic.rec"
    wait_for(lambda: log.exists() and log.stat().st_size and open_records(log).count > 1)
    wait_for(lambda: (node / "node.json").exists() and len(node_item(run)["jobs"]) >= jobs)


def agent_of(run: Path, jobs: int = 1) -> psutil.Process:
    """The only agent of a run, which its command line names, once it is recorded as `until_recorded` says."""
    until_recorded(run, jobs)
    (agent,) = agents_of(run)
    return agent


def gone(run: Path) -> None:
    """No process of ringtap's is left of a run."""
    wait_for(lambda: not processes_of(run))


def run_item(run: Path) -> dict[str, Any]:
    item: dict[str, Any] = json.loads((run / "run.json").read_text())
    return item


def node_item(run: Path, node: str = "here") -> dict[str, Any]:
    item: dict[str, Any] = json.loads((run / "nodes" / node / "node.json").read_text())
    return item


def rows_of(run: Path, name: str = "nic/nic.rec", node: str = "here") -> list[tuple[Any, ...]]:
    """The records of a log that ends cleanly."""
    records = open_records(run / "nodes" / node / name)
    assert records.torn_bytes == 0
    return records.tail()


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """See that a process is gone afterwards, whatever a test does."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()


def without_launcher() -> dict[str, str]:
    """The environment without what a launcher would set."""
    prefixes = ("SLURM_", "OMPI_", "PMI", "RINGTAP_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
