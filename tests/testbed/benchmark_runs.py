"""Benchmarks started as a user starts them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.unit.agent_processes import ended

ROOT = Path(__file__).resolve().parents[2]
# --quick promises a minute on two cores of its own; a test shares them with whatever else the machine does meanwhile
BUDGET_S = 60 + 60


def benchmark(name: str) -> list[str]:
    """The command of a benchmark."""
    return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py")]


def quick(name: str, folder: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Run it with --quick; what it writes by the way goes to ``scratch`` in the folder.

    Returns:
        The figures of its last line, every sample, and its tables.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    raw, markdown = folder / "raw.json", folder / "tables.md"
    begun_s = time.monotonic()
    done = subprocess.run(
        [*benchmark(name), "--quick", "-o", str(raw), "--markdown", str(markdown), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=BUDGET_S + 120,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    took_s = time.monotonic() - begun_s
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert took_s < BUDGET_S, done.stderr
    figures, results = json.loads(done.stdout.splitlines()[-1]), json.loads(raw.read_text())
    assert results["figures"] == figures
    assert not results["failures"]
    return figures, results, markdown.read_text()


def interrupt(name: str, *arguments: str, at: str, after_s: float) -> None:
    """Interrupt it so many seconds after it said that it measures something: it ends at once, and without figures."""
    command = [*benchmark(name), *arguments]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process:
        assert process.stderr is not None
        while at not in (line := process.stderr.readline()):
            assert line
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert output == ""
