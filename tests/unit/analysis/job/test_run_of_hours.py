"""A long run is read by processes of this machine, and its report and its exports do not hold it in memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from pyarrow import parquet

from ringtap.analysis import dask_workers
from ringtap.analysis.export import perfetto, tensorboard
from ringtap.analysis.job.join_rank_and_node_logs import JobLogs
from ringtap.analysis.job.run import Job, open_job
from ringtap.analysis.report import page
from ringtap.analysis.runs import derived_table_cache, node_batches
from ringtap.cli import main
from ringtap.core.errors import MeasurementError
from tests.gold.job_run import MS, Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long]

TRUTH = Truth(iterations=12, compute_ms=(100, 130, 90), offsets_ns=(0, 5 * MS, -3 * MS))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is treated as a long one, with a batch per node, on a machine of two cores."""
    monkeypatch.setattr(node_batches, "_BATCH_NODES", 1)
    monkeypatch.setattr(node_batches, "_MEMORY_ROWS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    write_ddp_job(tmp_path / "job", TRUTH)
    return tmp_path / "job"


def test_processes_find_what_one_finds_and_the_report_reads_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = open_job(run, derived=tmp_path / "alone")
    assert job.logs.batches.processes == 2
    alone = job.summary()
    assert main(["analyze", str(run), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {name: printed[name] for name in alone} == json.loads(json.dumps(alone))
    made = {path.name for path in (run / "derived/node_iterations.parquet").iterdir()}
    assert made == {f"0000{number}.parquet" for number in range(3)}
    # that of multiprocessing may have begun in a test before this one, and stays
    assert not [one for one in psutil.Process().children() if "resource_tracker" not in " ".join(one.cmdline())]
    stored = derived_table_cache.stored(open_job(run))
    monkeypatch.setattr(page, "_MAX_EMBEDDED_BYTES", 100)
    with monkeypatch.context() as patch:
        for name in ("work", "traffic", "parts"):
            patch.setattr(JobLogs, name, property(lambda _: pytest.fail("the run is analyzed again")))
        assert stored.summary() == json.loads(json.dumps(alone))
        tables = {name: getattr(stored, name) for name in ("iterations", "ranks", "flows")}
        measured = stored.logs.measured
        assert main(["report", str(run)]) == 0
    for name, found in tables.items():
        pd.testing.assert_frame_equal(found, getattr(job, name))
    assert measured.tolist() == job.logs.measured.tolist()
    assert 'href="iterations.csv" download' in (run / "report/report.html").read_text()  # too large for the page
    # a log that has grown since makes the tables stale
    with (run / "nodes/n1/nic/nic.rec").open("ab") as log:
        log.write(b"torn")
    assert type(derived_table_cache.stored(open_job(run))) is Job


def test_a_process_that_dies_is_one_sentence() -> None:
    with pytest.raises(MeasurementError, match="was ended"), dask_workers.workers(None, 2) as executor:
        assert executor is not None
        executor.submit(signal.raise_signal, signal.SIGKILL).result()


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from ringtap.analysis.dask_workers import workers\n"
        "with workers(None, 2) as executor:\n"
        "    print(*{executor.submit(os.getpid).result() for _ in range(20)}, flush=True)\n"
        "    list(executor.map(time.sleep, [600, 600]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert children
        parent.kill()
    gone, alive = psutil.wait_procs(children, timeout=30)  # at once, but for a busy machine
    assert len(gone) == len(children) and not alive


def test_exports_go_batch_by_batch_or_say_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(JobLogs, "whole", lambda *_: pytest.fail("a whole table is read"))
        assert main(["export", str(run), "--to", "parquet", "-o", str(tmp_path / "tables")]) == 0
    job = open_job(run)
    for name in node_batches.TABLES:
        keys = ["iteration", "rank"] if name == "rank_iterations" else ["iteration", "node"]
        found, expected = (
            table.sort_values(keys, kind="stable", ignore_index=True)
            for table in (pd.read_parquet(tmp_path / "tables" / f"{name}.parquet"), getattr(job, name))
        )
        pd.testing.assert_frame_equal(found, expected)
        assert found.attrs == expected.attrs
    assert parquet.ParquetFile(tmp_path / "tables/rank_iterations.parquet").metadata.num_row_groups == 3
    steps = job.logs.recorded_steps
    assert steps == len(job.logs.run.steps) > 30
    for module, to in ((perfetto, "perfetto"), (tensorboard, "tensorboard")):
        monkeypatch.setattr(module, "MAX_STEPS", steps - 1)
        assert main(["export", str(run), "--to", to, "-o", str(tmp_path / to)]) == 2
        assert f"has {steps} steps of its ranks" in capsys.readouterr().err
        assert not (tmp_path / to).exists()


def test_a_killed_analysis_goes_on(run: Path, tmp_path: Path) -> None:
    """The tables that were complete when it was killed are not made again."""
    program = (
        "import os, signal\n"
        "from ringtap.analysis.job import counters_per_iteration\n"
        "from ringtap.analysis.job.run import open_job\n"
        "from ringtap.analysis.runs import node_batches\n"
        "node_batches._BATCH_NODES, node_batches._MEMORY_ROWS = 1, 0\n"
        "read = counters_per_iteration.node_table\n"
        "def table(node, borders):\n"
        "    if node.name == 'n2':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return read(node, borders)\n"
        "counters_per_iteration.node_table = table\n"
        f"open_job({str(run)!r}, derived={str(tmp_path / 'out')!r}).summary()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.parquet") if path.is_file()}
    assert any(path.parent.name == "node_iterations.parquet" for path in made)
    time.sleep(0.01)
    summary = open_job(run, derived=tmp_path / "out").summary()
    assert {path: path.stat().st_mtime_ns for path in made} == made
    assert summary == open_job(run, derived=tmp_path / "again").summary()
