"""ringtap's own processes import nothing from the current folder."""

import gzip
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import ringtap
from ringtap.core.isolated_python import RUN_MODULE, python_command, short_command
from ringtap.core.run_directory_schema import CROSS_COMMAND
from tests.unit.traffic_processes import plan_for

pytestmark = pytest.mark.shares

ROOT = Path(ringtap.__file__).parent.parent
RING = ROOT / "examples" / "ring.pcap.gz"
TRAPS = ("json", "numpy", "select", "queue", "statistics", "pkgutil", "selectors", "socket", "sitecustomize")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project whose files have the names of modules; each notes that it was imported."""
    folder = tmp_path / "project"
    (folder / "ringtap").mkdir(parents=True)
    note = tmp_path / "imported"
    for name in (*(f"{name}.py" for name in TRAPS), "ringtap/__init__.py"):
        code = f'open({str(note)!r}, "a").write({name!r} + " ")\nraise ImportError\n'
        (folder / name).write_text(code)
    return folder


def start(folder: Path, *words: object) -> "subprocess.Popen[str]":
    """Start ringtap as its console script does: without the current folder on the path."""
    environment = dict(os.environ) | {"XDG_CACHE_HOME": str(folder.parent / "cache"), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    command = python_command(sys.executable, "ringtap.cli", *map(str, words))
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(folder: Path, *words: object, code: int = 0) -> str:
    process = start(folder, *words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert imported(folder) == "", err
    return out


def imported(folder: Path) -> str:
    path = folder.parent / "imported"
    return path.read_text() if path.exists() else ""


def test_the_traps_work(folder: Path) -> None:
    """Python itself takes them, so the other tests can fail."""
    for words in (["-c", "import json"], ["-m", "ringtap"]):
        (folder.parent / "imported").unlink(missing_ok=True)
        subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, check=False)
        assert imported(folder)


@pytest.mark.timeout(180)
def test_flows_compiles_and_reads(folder: Path) -> None:
    capture = folder.parent / "ring.pcap"
    capture.write_bytes(gzip.decompress(RING.read_bytes()))
    assert "conversations" in run(folder, "flows", capture, "--no-cache", "--json")
    assert list((folder.parent / "cache").rglob("kernels-*.o"))


@pytest.mark.timeout(180)
def test_a_run_is_recorded_and_analyzed(folder: Path) -> None:
    job = [sys.executable, "-I", "-c", "import time; time.sleep(0.5)"]
    run(folder, "run", "-o", "run", "--every", "50ms", "--", *job)
    run(folder, "analyze", "run", code=0)
    run(folder, "live", "--plain", "run")
    run(folder, "status", "run")


@pytest.mark.timeout(60)
def test_metrics_are_served(folder: Path) -> None:
    job = [sys.executable, "-I", "-c", "import os, time\nwhile not os.path.exists('end'): time.sleep(0.05)"]
    process = start(folder, "run", "-o", "run", "--metrics", "127.0.0.1:19465", "--", *job)
    try:
        for _ in range(200):
            try:
                with urllib.request.urlopen("http://127.0.0.1:19465/metrics", timeout=1) as answer:
                    assert b"ringtap_" in answer.read()
                    break
            except OSError:
                time.sleep(0.1)
        else:
            pytest.fail(f"no metrics; imported: {imported(folder)}")
    finally:
        (folder / "end").touch()
        process.communicate(timeout=60)
    assert imported(folder) == ""


@pytest.mark.timeout(120)
def test_doctor_asks_the_job_s_interpreter(folder: Path) -> None:
    process = start(folder, "doctor", "--json", "--python", sys.executable)
    out, _ = process.communicate(timeout=100)
    assert '"steps"' in out
    assert imported(folder) == ""


@pytest.mark.timeout(60)
def test_traffic_is_sent_and_received(folder: Path) -> None:
    serve = start(folder, "traffic", "serve", "--bind", "127.0.0.1:0", "--json")
    try:
        assert serve.stderr is not None
        address = next(line.split()[-1] for line in serve.stderr if line.startswith("listening on "))
        plan = plan_for(folder.parent, address)
        run(folder, "traffic", "send", plan)
    finally:
        serve.terminate()
        serve.communicate(timeout=30)
    assert imported(folder) == ""


def test_the_batch_script_runs_ringtap_s_module(folder: Path) -> None:
    script = run(folder, "submit", "--print", "--", "python", "src/train.py")
    line = shlex.split(script.splitlines()[-1])
    done = subprocess.run([*line[1:5], "--help"], cwd=folder, capture_output=True, text=True, check=False)
    assert "ringtap.slurm.run_job_steps" in done.stdout, done.stderr
    assert imported(folder) == ""


def test_a_command_is_shown_as_with_m() -> None:
    command = python_command("/usr/bin/python", "ringtap.cli", "traffic", "send", "plan")
    assert short_command(command) == ["/usr/bin/python", "-m", "ringtap.cli", "traffic", "send", "plan"]
    assert CROSS_COMMAND.search(" ".join(command))
    for other in (["python", "-c", "print()"], [RUN_MODULE], []):
        assert short_command(other) == other


def test_only_the_helper_starts_modules_of_ringtap() -> None:
    """Elsewhere, -m is for programs that are the job."""
    allowed = {"agents/sweep/job_launch_commands.py"}  # the models that ringtap ships are a job
    found = set()
    for folder in ("agents", "analysis", "collectors", "slurm", "trafficgen", "workload", "ringtap"):
        for path in (ROOT / folder).rglob("*.py"):
            if re.search(r"""["']-m["'],""", path.read_text()):
                found.add(str(path.relative_to(ROOT)))
    found.discard("ringtap/core/isolated_python.py")
    assert found == allowed
