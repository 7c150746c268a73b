"""Captures, jobs and sweeps read by workers of Dask: what they find is what one process finds."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

import dask
import dask_jobqueue  # noqa: F401 -- its defaults are part of Dask's configuration from now on
import numpy as np
import pandas as pd
import psutil
import pytest
from distributed import Client, LocalCluster

from ringtap.analysis import dask_workers
from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.pcap import read_captures, scan_cache
from ringtap.analysis.report.inputs import of_sweep
from ringtap.analysis.runs import derived_table_cache
from ringtap.analysis.runs.run import SweepRun, read_run
from ringtap.cli import main
from ringtap.core.errors import MeasurementError, UsageError
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import MS, START_NS, Truth, write_ddp_job
from tests.unit import capture_makers as makers
from tests.unit.agent_processes import wait_for

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clusters that tests start leave their files there."""
    with dask.config.set({"temporary-directory": str(tmp_path_factory.mktemp("dask"))}):
        yield


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with dask_workers.workers("local:2") as executor:
        yield executor


def test_work_of_this_machine_does_not_wait_for_ever_for_a_worker(executor: Executor) -> None:
    timeout = dask.config.get("distributed.scheduler.no-workers-timeout")
    assert timeout == f"{dask_workers._ANSWER_S}s"


def packets(count: int) -> bytes:
    """A capture of so many packets of two connections."""
    frames = [makers.ethernet(makers.udp(makers.A4, makers.B4, (1 + n % 2, 9), 100)) for n in range(2)]
    times = [START_NS + n * MS // 2 for n in range(count)]
    return makers.classic([makers.Packet(t_ns, frames[n % 2], 142) for n, t_ns in enumerate(times)], nano=True)


def test_captures_are_read_to_the_same_bits(tmp_path: Path, executor: Executor) -> None:
    for number in range(3):
        (tmp_path / f"part{number}.pcap").write_bytes(packets(40 + 10 * number))
    alone, together = read_captures(tmp_path), read_captures(tmp_path, workers=executor)
    assert together.files == alone.files
    for name in ("conversations", "cells", "queue_pairs"):
        tables = [np.asarray(getattr(found.scanned, name)) for found in (together, alone)]
        assert tables[0].tobytes() == tables[1].tobytes()
    assert together.counts == alone.counts
    assert together.start_ns == alone.start_ns


def test_a_large_capture_is_handed_over_by_its_cache(tmp_path: Path, executor: Executor) -> None:
    """It is not sent through the scheduler: the cache that the worker left beside the capture is what is read."""
    path = tmp_path / "large.pcap"
    path.write_bytes(packets(300_000))
    told: list[tuple[int, int | None]] = []
    found = read_captures(path, workers=executor, progress=lambda done, total: told.append((done, total)))
    size = path.stat().st_size
    assert told == [(size, size)]
    assert isinstance(found.scanned.cells, np.memmap)
    assert found.binned(what="packets").sum() == 300_000
    before = scan_cache.places(path)[0].stat().st_mtime_ns
    assert read_captures(path, workers=executor).counts == found.counts
    assert scan_cache.places(path)[0].stat().st_mtime_ns == before


def test_what_is_no_capture_is_the_same_sentence(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.pcap").write_bytes(packets(5))
    (tmp_path / "odd.pcap").write_bytes(b"nonsense, and long enough to be looked at")
    monkeypatch.chdir(tmp_path)  # the words name a file as the user did
    with pytest.raises(UsageError) as alone:
        read_captures(["odd.pcap", "good.pcap"])
    with pytest.raises(UsageError) as together:
        read_captures(["odd.pcap", "good.pcap"], workers=executor)
    assert str(together.value) == str(alone.value)
    assert str(alone.value).startswith("odd.pcap is not a capture")


def test_a_pipe_cannot_be_handed_over(tmp_path: Path, executor: Executor) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("-", str(tmp_path / "pipe")):
        with pytest.raises(UsageError, match="a pipe is read by this process alone"):
            read_captures(name, workers=executor)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Three nodes, one with a capture, one with a damaged log, one with a torn one."""
    path = tmp_path / "job"
    write_ddp_job(path, Truth(iterations=8, compute_ms=(100, 130, 90), offsets_ns=(0, 5 * MS, -3 * MS)))
    capture = path / "nodes/n0/packets/eth0-0.pcap"
    capture.parent.mkdir()
    capture.write_bytes(packets(4000))
    (path / "nodes/n1/nic/nic.rec").write_bytes(b"{}\n")
    with (path / "nodes/n2/sockets/sockets.rec").open("ab") as log:
        log.write(b"torn")
    return path


def test_a_job_is_joined_to_the_same_bits(tmp_path: Path, job: Path, executor: Executor) -> None:
    sources = derived_table_cache.sources_of(job)
    summaries = []
    for name, opened in (("alone", open_job(job)), ("together", open_job(job, executor))):
        summaries.append(summarize(opened))
        derived_table_cache.write(opened, summaries[-1], tmp_path / name, sources)
    assert summaries[0] == summaries[1]
    assert any("n1/nic/nic.rec cannot be used" in line for line in summaries[1]["warnings"])
    assert any("n2/sockets/sockets.rec end in a torn record" in line for line in summaries[1]["warnings"])
    for name in derived_table_cache.TABLES:
        first, second = ((tmp_path / who / f"{name}.parquet").read_bytes() for who in ("alone", "together"))
        assert first == second, name
    assert len(pd.read_parquet(tmp_path / "together" / "byte_accounts.parquet"))


def test_a_sweep_is_measured_to_the_same_numbers(
    tmp_path: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent"), ("vgg16", "iperf")])
    with (tmp_path / "sweep/series/vgg16-iperf-1/nodes/S0/nic/nic.rec").open("ab") as log:
        log.write(b"torn")
    monkeypatch.chdir(tmp_path)  # a relative path is another one where a worker stands
    said = []
    for together in (False, True):
        sweep = read_run("sweep")
        assert isinstance(sweep, SweepRun)
        measured = of_sweep(sweep, executor) if together else of_sweep(sweep)
        said.append([*(one.to_json() for one in measured.series), measured.torn])
    assert said[0] == said[1]
    assert said[1][-1] == {"series/vgg16-iperf-1/nodes/S0/nic/nic.rec": 1}


def test_the_verbs_say_the_same(tmp_path: Path, job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        described = tmp_path / "scheduler.json"
        described.write_text(json.dumps(cluster.scheduler.identity()))
        for command in (
            ["flows", str(job / "nodes/n0/packets/eth0-0.pcap"), "--json"],
            ["analyze", str(job), "-o", str(tmp_path / "tables"), "--json"],
            ["report", str(job), "-o", str(tmp_path / "report"), "--force", "--json"],
        ):
            said = []
            for where in ([], ["--dask", cluster.scheduler_address]):
                assert main([*command, *where]) == 0
                said.append(capsys.readouterr().out)
                (tmp_path / "tables" / derived_table_cache.SOURCES).unlink(missing_ok=True)  # to be made again
            assert said[0] == said[1], command[0]


def test_a_worker_that_dies_again_and_again_is_one_sentence() -> None:
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        dask_workers.workers("local:1") as executor,
        pytest.raises(MeasurementError, match="workers of local:1 died over the same work"),
    ):
        list(executor.map(os._exit, [1]))


def test_results_come_in_order_whatever_is_done_together(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "_TASKS_A_THREAD", 2)
    assert list(executor.map(operator.sub, range(50), itertools.repeat(1))) == list(range(-1, 49))
    assert list(executor.map(operator.neg, [])) == []
    assert next(executor.map(operator.neg, range(50))) == 0


def test_a_result_is_released_when_it_was_taken(executor: Executor) -> None:
    assert isinstance(executor, dask_workers.DaskExecutor)
    found = executor.map(operator.neg, range(12))
    assert list(itertools.islice(found, 10)) == [-number for number in range(10)]
    wait_for(lambda: sum(map(len, executor._client.has_what().values())) <= 2, 10)
    assert list(found) == [-10, -11]


def test_one_call_is_a_future(executor: Executor) -> None:
    assert executor.submit(operator.sub, 3, 1).result(timeout=10) == 2
    with pytest.raises(ZeroDivisionError):
        executor.submit(operator.truediv, 3, 0).result(timeout=10)


def test_any_executor_reads_captures(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"part{number}.pcap").write_bytes(packets(40 + 10 * number))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        together = read_captures(tmp_path, workers=processes)
    assert together.scanned.conversations.tobytes() == read_captures(tmp_path).scanned.conversations.tobytes()


def test_nothing_that_answers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "_ANSWER_S", 0.3)
    with (
        pytest.raises(UsageError, match=r"no scheduler of Dask answers at tcp://127\.0\.0\.1:9"),
        dask_workers.workers("tcp://127.0.0.1:9"),
    ):
        pass
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        pytest.raises(UsageError, match="has no workers: start some with dask worker"),
        dask_workers.workers(cluster.scheduler_address),
    ):
        pass


def test_workers_that_go_away_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "_LOOK_S", 0.2)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        dask_workers.workers(cluster.scheduler_address) as executor,
    ):
        assert list(executor.map(operator.add, [1, 2], [3, 4])) == [4, 6]
        cluster.scale(0)
        wait_for(lambda: not cluster.scheduler.workers)  # until then, the worker may do the work all the same
        with pytest.raises(MeasurementError, match="are gone: start them again"):
            list(executor.map(operator.neg, [1]))


def test_a_scheduler_that_goes_away_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "_ANSWER_S", 0.5)
    cluster = LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0")
    with dask_workers.workers(cluster.scheduler_address) as executor:
        cluster.close()
        with pytest.raises(MeasurementError, match="are gone: start them again"):
            list(executor.map(operator.neg, [1]))


@pytest.mark.parametrize("words", ["locally", "local:0", "local:-1", "slurm:x", "host:8786", "/no/such/file.json"])
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match="neither local, local:N, slurm"), dask_workers.workers(words):
        pass


def test_without_dask_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in (
        ("dask", "local"),
        ("cryptography", "local"),
        ("dask_jobqueue", "slurm"),
    ):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            with pytest.raises(UsageError, match=r" install .*\[dask\]"), dask_workers.workers(words):
                pass


def test_dask_is_loaded_for_a_scheduler_alone(tmp_path: Path) -> None:
    (tmp_path / "a.pcap").write_bytes(packets(5))
    program = "import sys; from ringtap.cli import main; main(sys.argv[1:]); print('dask' in sys.modules)"
    command = [sys.executable, "-c", program, "flows", str(tmp_path / "a.pcap")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_table_needs_no_workers(tmp_path: Path) -> None:
    (tmp_path / "times.csv").write_text("bandwidth_gbps,iteration_s\n")
    assert main(["report", str(tmp_path / "times.csv"), "--dask", "local"]) == 2


def test_without_the_keys_nobody_gives_work_or_reads_what_is_done(executor: Executor) -> None:
    from distributed import Client, Security

    client = executor._client  # type: ignore[attr-defined]
    info = client.scheduler_info()
    tls = [info["address"], *info["workers"]]
    assert all(address.startswith("tls://127.0.0.1:") for address in tls)
    for address in (info["address"], info["address"].replace("tls", "tcp")):
        keys = Security.temporary() if address.startswith("tls") else None
        with pytest.raises(OSError, match=r"TLS certificate does not match|Timed out|Connection"):
            Client(address, security=keys, timeout=2)
    services = [info["services"], *(worker["services"] for worker in info["workers"].values())]
    ports = {port for one in services for port in one.values()}
    assert len(ports) > 1
    for port in ports:
        for path in ("", "status", "info/main/workers.html", "json/identity.json", "metrics", "statics/css/base.css"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10)
    assert executor.submit(len, "ab").result(20) == 2


def test_slurms_job_is_that_of_dasks_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a folder/python")
    settings = {"cores": 2, "processes": 2, "memory": "4GB", "account": "def-someone", "walltime": "00:10:00"}
    settings |= {"shared-temp-directory": str(tmp_path), "job-script-prologue": ["module load python"]}
    with (
        dask.config.set({f"jobqueue.slurm.{name}": value for name, value in settings.items()}),
        dask.config.set({"temporary-directory": str(tmp_path)}),
        contextlib.ExitStack() as stack,
    ):
        cluster = dask_workers.slurm_cluster(stack)
        script = cluster.job_script()
        assert cluster.scheduler_address.startswith("tls://")
        keys = [Path(word) for word in script.split() if word.startswith(str(tmp_path))]
        assert [path.read_text().splitlines()[0] for path in keys] == [
            *["-----BEGIN CERTIFICATE-----"] * 2,
            "-----BEGIN PRIVATE KEY-----",
        ]
        assert {path.parent.stat().st_mode & 0o77 for path in keys} == {0}  # for their owner alone
    for words in ("-A def-someone", "--cpus-per-task=2", "--mem=4G", "-t 00:10:00"):
        assert f"#SBATCH {words}\n" in script
    assert "\nmodule load python\n" in script
    safe = " -P" if sys.version_info >= (3, 11) else ""
    assert f"'/a folder/python'{safe} -m distributed.cli.dask_worker tls://" in script
    assert not any(path.exists() for path in keys)


def test_slurm_without_a_configuration_says_what_to_set() -> None:
    with pytest.raises(UsageError, match=r"set jobqueue\.slurm\.cores in"), dask_workers.workers("slurm"):
        pass


def test_slurm_needs_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with (
        dask.config.set({"jobqueue.slurm.cores": 1, "jobqueue.slurm.memory": "1GB"}),
        pytest.raises(UsageError, match="needs sbatch, which is not on this machine"),
        dask_workers.workers("slurm"),
    ):
        pass


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("echo 12 PENDING Priority", "no worker of Dask started in 1 s, and .*: job 12 is pending .Priority."),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "job 12 of Slurm ended before a worker"),
        ("exit 1", "no worker of Dask started in 1 s, and ringtap waits no longer: squeue does not answer"),
    ],
)
def test_the_first_worker_in_a_job_of_slurm_has_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: str, error: str
) -> None:
    """A real scheduler without workers; Slurm's answer is that of a script."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(dask_workers, "_LOOK_S", 0.02)
    monkeypatch.setattr(dask_workers, "_QUEUED_S", 1.0)
    # 0.4 s from look to look, however long squeue takes
    monkeypatch.setattr(dask_workers, "time", SimpleNamespace(monotonic=itertools.count(0, 0.4).__next__))
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        caplog.at_level("INFO", "ringtap"),
        pytest.raises(MeasurementError, match=error),
    ):
        dask_workers._await_worker(client, lambda: ["12"])
    told = [record.message for record in caplog.records if record.name == "ringtap"]
    assert told[0] == "waiting for a worker in a job of Slurm (squeue --me)"
    assert told[1:] == ["waiting for a worker in a job of Slurm: job 12 is pending (Priority)"] * ("12" in answer)


def test_an_interrupt_ends_all_of_it_in_order(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal; one that has just begun to start workers says so, and no more."""
    for number in range(2):
        (tmp_path / f"part{number}.pcap").write_bytes(packets(5))
    command = [sys.executable, "-m", "ringtap.cli", "flows", str(tmp_path), "--dask", "local:1"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    )
    while not list(scratch.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "ringtap: interrupted\n")
    deadline_s = time.monotonic() + 20  # Python's own helper process ends when it sees the others gone
    while any(in_session(one, process.pid) for one in psutil.process_iter()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert list(scratch.iterdir()) == []


def in_session(process: psutil.Process, leader: int) -> bool:
    try:
        return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_a_worker_that_ends_while_it_starts_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("Nanny failed to start.")

    monkeypatch.setattr("distributed.LocalCluster", fail)
    with (
        pytest.raises(MeasurementError, match="a worker of Dask ended while it started"),
        dask_workers.workers("local:2"),
    ):
        pass


def test_ctrl_c_waits_for_processes_that_are_started_also_where_a_thread_takes_it() -> None:
    go_on, done = threading.Event(), []
    # it began before: it does not block the signal
    thread = threading.Thread(target=lambda: go_on.wait(10) and signal.pthread_kill(threading.get_ident(), 2))
    thread.start()
    with pytest.raises(KeyboardInterrupt), dask_workers._uninterrupted():
        go_on.set()
        thread.join()
        time.sleep(0.01)
        done.append("all of it")
    assert done
