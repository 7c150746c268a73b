"""Provides workers for the analysis: processes of this machine, or of Dask here, at an address, or in Slurm jobs.

Dask itself handles queues, tasks of workers that died, spilling and its own configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ringtap
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.installation import cache_folder, install_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.units import format_duration

if TYPE_CHECKING:
    from distributed import Client
    from distributed import Future as DaskFuture

T = TypeVar("T")
_COUNTED = re.compile(r"(local|slurm)(?::([1-9]\d*))?")
_ADDRESS = re.compile(r"\w+://\S+")
_LOGGERS = ("distributed", "distributed.client", "tornado.application", "asyncio")
_ANSWER_S = 10.0  # time limit for a scheduler's answer, and for its first worker
_TASKS_A_THREAD = 32  # the overhead of more tasks exceeds what better balance saves
_TASKS_AHEAD = 4  # tasks per thread that the scheduler holds at a time, each with a copy of its arguments
_LOOK_S = 5.0  # interval of the check for remaining workers, and for the first worker in a job of Slurm
_QUEUED_S = 3600.0  # time limit for that first worker
# Parameters of glibc's malloc and their numbers in mallopt. Memory that was freed is used again, instead of being given
# back to the kernel, which clears it page by page for the next table: an eighth of the processors' time.
_MALLOC = {"MMAP_THRESHOLD": (-3, 32 << 20), "TRIM_THRESHOLD": (-1, 1 << 30)}


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--dask``."""
    parser.add_argument(
        "--dask",
        metavar="WHO",
        help="read with Dask: local[:PROCESSES], the address or the file of a scheduler, or slurm[:JOBS]",
    )


@contextlib.contextmanager
def workers(scheduler: str | None, processes: int = 1) -> Iterator[Executor | None]:
    """Provide the workers that ``--dask`` names until the block ends; None for this process.

    Args:
        scheduler: value of the option; None: it was not given.
        processes: processes of this machine to read without the option; 1: this one.

    Raises:
        UsageError: ``scheduler`` is not understood, Dask is not installed, or no scheduler or worker answers.
        MeasurementError: Slurm accepts no job, or a process of this machine was ended.
    """
    if scheduler is None:
        # on other systems, a process that has loaded libraries is not forked safely
        with _forked(processes) if processes > 1 and sys.platform == "linux" else contextlib.nullcontext() as executor:
            yield executor
        return
    try:
        import dask

        if not {"logging", "logging-file-config"} & dask.config.get("distributed", {}).keys():
            # distributed reads this when it is imported; errors that matter to a user are exceptions
            dask.config.set({"logging": dict.fromkeys(_LOGGERS, "critical") | dask.config.get("logging", {})})
        from distributed.utils import silence_logging_cmgr
    except ModuleNotFoundError as error:
        raise UsageError(f"--dask needs Dask, which is not installed here: {install_command('dask')}") from error
    counted = _COUNTED.fullmatch(scheduler)
    if not counted and not _ADDRESS.fullmatch(scheduler) and not Path(scheduler).is_file():
        raise UsageError(
            f"--dask {scheduler} is neither local, local:N, slurm, slurm:N, an address (tcp://HOST:PORT) nor a "
            "scheduler's file"
        )
    settings: dict[str, Any] = {
        "distributed.comm.timeouts.connect": f"{_ANSWER_S}s",
        "distributed.admin.large-graph-warning-threshold": "1TB",
        "distributed.worker.profile.enabled": False,  # of a hundred samples per second that nobody reads
        "distributed.nanny.pre-spawn-environ.ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    for name, (_, value) in _MALLOC.items():
        settings[f"distributed.nanny.pre-spawn-environ.MALLOC_{name}_"] = value
    if counted and counted[1] == "local":  # if no worker starts, fail instead of waiting forever
        settings["distributed.scheduler.no-workers-timeout"] = f"{_ANSWER_S}s"
    with contextlib.ExitStack() as stack:
        if counted:  # no page of what they do, which any user of the machine could read; their files are removed
            settings |= {f"distributed.{role}.http.routes": [] for role in ("scheduler", "worker")}
            settings["temporary-directory"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="ringtap-dask-"))
        stack.enter_context(dask.config.set(settings))
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))
        stack.enter_context(warnings.catch_warnings())
        # without internet access Dask uses the host name, which is sufficient
        warnings.filterwarnings("ignore", "Couldn't detect a suitable IP address", RuntimeWarning)
        if counted is None:
            client = _existing(scheduler, stack)
        elif counted[1] == "local":
            client = _local(int(counted[2] or len(os.sched_getaffinity(0))), stack)
        else:
            client = _slurm(int(counted[2] or 1), stack)
        yield DaskExecutor(client, scheduler)


@contextlib.contextmanager
def _forked(count: int) -> Iterator[Executor]:
    """Start processes of this machine, which share the libraries that this one has loaded, and its settings."""
    _keep_memory()
    try:
        with ProcessPoolExecutor(
            count, multiprocessing.get_context("fork"), _follow_parent, (die_with_parent(),)
        ) as executor:
            with warnings.catch_warnings(), _uninterrupted():
                # of threads: none has work yet
                warnings.simplefilter("ignore", DeprecationWarning)
                executor.submit(int).result()  # starts all of them
            yield executor
    except BrokenProcessPool as error:
        raise MeasurementError(
            "a process that read nodes was ended, which happens where memory lacks: the same command goes on where it "
            "stopped, and with --dask local:1 one process reads"
        ) from error


def _keep_memory() -> None:
    """Have this process and those that it starts use freed memory again, also pyarrow."""
    if set_parameter := getattr(ctypes.CDLL(None), "mallopt", None):  # other C libraries have none
        for number, value in _MALLOC.values():
            set_parameter(number, value)
    with contextlib.suppress(ModuleNotFoundError):
        import pyarrow.parquet

        pyarrow.set_memory_pool(pyarrow.system_memory_pool())


def _follow_parent(end: Callable[[], None]) -> None:
    """Leave Ctrl-C to the parent process, and end when it has ended, however that was."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end()


def _local(count: int, stack: contextlib.ExitStack) -> Client:
    """Start workers on this machine with one thread each, because a task holds the GIL or uses every core itself."""
    from distributed import Client, LocalCluster

    if "PYTHONSAFEPATH" not in os.environ:  # for the workers, which import nothing from the current folder
        os.environ["PYTHONSAFEPATH"] = "1"
        stack.callback(os.environ.pop, "PYTHONSAFEPATH", None)
    resource_tracker.ensure_running()  # its start unblocks signals
    with _uninterrupted():
        try:
            cluster = LocalCluster(
                n_workers=count,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                silence_logs=logging.CRITICAL,
                security=_security(),
            )
        except RuntimeError as error:
            raise MeasurementError(
                "a worker of Dask ended while it started on this machine, which happens where memory lacks: "
                "--dask local:1 starts only one"
            ) from error
        return stack.enter_context(Client(stack.enter_context(cluster)))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put SIGINT off: processes that are half started do not end cleanly, and those started here inherit the mask."""
    arrived: list[int] = []
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    is_main = threading.current_thread() is threading.main_thread()
    # threads of libraries do not block it
    previous = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number)) if is_main else None
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    if arrived:
        raise KeyboardInterrupt


def _security() -> Any:
    """Return new TLS keys: anyone who reaches a scheduler that needs none, also locally, can run code as its user."""
    from distributed import Security

    try:
        return Security.temporary()
    except ImportError as error:
        raise UsageError(
            f"--dask needs cryptography, which is not installed here: {install_command('dask')}"
        ) from error


def _existing(scheduler: str, stack: contextlib.ExitStack) -> Client:
    from distributed import Client

    options = {"scheduler_file": scheduler} if Path(scheduler).is_file() else {"address": scheduler}
    try:
        client = stack.enter_context(Client(**options, timeout=_ANSWER_S, set_as_default=False))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"no scheduler of Dask answers at {scheduler}: start one with dask scheduler") from error
    try:
        client.wait_for_workers(1, timeout=_ANSWER_S)
    except TimeoutError as error:
        raise UsageError(
            f"the scheduler of Dask at {scheduler} has no workers: start some with dask worker {scheduler}"
        ) from error
    return client


def _slurm(count: int, stack: contextlib.ExitStack) -> Client:
    """Start Slurm jobs as ``jobqueue.slurm`` of Dask's configuration describes them."""
    from distributed import Client

    cluster = slurm_cluster(stack)
    try:
        # Dask itself would retry a refused submission and print tracebacks
        test = subprocess.run(
            ["sbatch", "--test-only"],
            input=cluster.job_script(),
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=die_with_parent(),
        )
    except FileNotFoundError as error:
        raise UsageError("--dask slurm needs sbatch, which is not on this machine: use a login node") from error
    if test.returncode:
        errors = [line.removeprefix("sbatch: error: ") for line in test.stderr.splitlines() if "error:" in line]
        raise MeasurementError(f"Slurm takes no job of Dask: {errors[0] if errors else 'it gives no reason'}")
    cluster.scale(jobs=count)
    client = stack.enter_context(Client(cluster))
    _await_worker(client, lambda: [worker.job_id for worker in cluster.workers.values() if worker.job_id])
    return client


def _await_worker(client: Client, submitted: Callable[[], list[str]]) -> None:
    """Wait for the first worker in a job of Slurm, and log what the jobs wait for whenever that changes.

    Args:
        client: client of the scheduler.
        submitted: returns the numbers of the jobs that Slurm accepted so far.

    Raises:
        MeasurementError: every job ended before a worker started, or none started in time.
    """
    log, said = logging.getLogger("ringtap"), ""
    log.info("waiting for a worker in a job of Slurm (squeue --me)")
    end_s = time.monotonic() + _QUEUED_S
    while True:
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(1, timeout=min(_LOOK_S, _QUEUED_S))
            return
        jobs = submitted()
        states = _queued(jobs)
        if jobs and states == "":
            raise MeasurementError(
                f"job {', '.join(jobs)} of Slurm ended before a worker of Dask started in it: its output "
                f"(slurm-{jobs[0]}.out) says why"
            )
        if time.monotonic() > end_s:
            why = states or ("squeue does not answer" if jobs else "Slurm has accepted no job")
            raise MeasurementError(
                f"no worker of Dask started in {format_duration(_QUEUED_S)}, and ringtap waits no longer: {why}; ask "
                "for less in jobqueue.slurm of Dask's configuration"
            )
        if states and states != said:
            said = states
            log.info("waiting for a worker in a job of Slurm: %s", said)


def _queued(jobs: list[str]) -> str | None:
    """Return the states of jobs in Slurm's queue as text; empty if they are no longer there, None if not known."""
    if not jobs:
        return None
    try:
        answer = subprocess.run(
            ["squeue", "--noheader", "--jobs", ",".join(jobs), "--format", "%i %T %r"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_ANSWER_S,
            preexec_fn=die_with_parent(),
        )
    except subprocess.TimeoutExpired:
        return None
    if answer.returncode and "Invalid job id" not in answer.stderr:
        return None
    rows = [line.split(maxsplit=2) for line in answer.stdout.splitlines()]
    return ", ".join(f"job {number} is {state.lower()} ({why})" for number, state, why in rows)


def slurm_cluster(stack: contextlib.ExitStack) -> Any:
    """Create a dask-jobqueue cluster that has no jobs yet.

    Args:
        stack: exit stack that closes the cluster.

    Raises:
        UsageError: dask-jobqueue is not installed, or Dask's configuration lacks a value that a job needs.
    """
    import dask

    try:
        from dask_jobqueue import SLURMCluster
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--dask slurm needs dask-jobqueue, which is not installed here: {install_command('dask')}"
        ) from error
    found = dask.config.get("jobqueue.slurm")
    missing = [name for name in ("cores", "memory") if not found.get(name)]
    if missing:
        raise UsageError(
            f"Dask's configuration does not say how much a job of Slurm gets: set jobqueue.slurm.{missing[0]} in "
            f"~/.config/dask/jobqueue.yaml, or DASK_JOBQUEUE__SLURM__{missing[0].upper()}"
        )
    # home directories are on every node
    shared = Path(found.get("shared-temp-directory") or cache_folder()).expanduser()
    shared.mkdir(parents=True, exist_ok=True)
    keys = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".dask-", dir=shared)))  # owner-only
    safe = ["-P"] if sys.version_info >= (3, 11) else []  # imports nothing from the current folder
    python = found.get("python") or shlex.join([sys.executable, *safe])
    options = {"dashboard": False, "dashboard_address": "127.0.0.1:0"} | (found.get("scheduler-options") or {})
    with _uninterrupted():
        return stack.enter_context(
            SLURMCluster(python=python, security=_in_files(_security(), keys), scheduler_options=options)
        )


def _in_files(security: Any, folder: Path) -> Any:
    """Write the keys to files, for processes on other machines."""
    from distributed import Security

    names = {}
    for name, text in security.get_tls_config_for_role("worker").items():
        if text is not None:
            (folder / name).write_text(text)
            names[name] = str(folder / name)
    roles = {
        f"tls_{role}_{name}": names[name] for role in ("client", "scheduler", "worker") for name in ("cert", "key")
    }
    return Security(require_encryption=True, tls_ca_file=names["ca_file"], **roles)


def _version() -> str:
    return ringtap.__version__


def _call_each(work: Callable[..., T], rows: Iterable[tuple[Any, ...]]) -> list[T]:
    return [work(*row) for row in rows]


class DaskExecutor(Executor):
    """Executor that makes calls on the workers of a Dask scheduler.

    Unlike that of ``Client.get_executor()``, `map` keeps each result on its worker until it is requested and then
    releases it, combines many short calls into one task, and raises an error when no worker is left.

    Args:
        client: client that is connected to the scheduler.
        scheduler: name of the scheduler in messages.
    """

    def __init__(self, client: Client, scheduler: str) -> None:
        self._client, self._scheduler = client, scheduler
        others = set(self._query(client.run, _version).values()) - {ringtap.__version__}
        if others:
            raise UsageError(
                f"the workers of {scheduler} have ringtap {', '.join(sorted(others))}, this is {ringtap.__version__}: "
                "install the same one"
            )

    def submit(self, work: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        """Call a function once, as `Executor.submit` does."""
        future: Future[T] = self._client.get_executor(pure=False).submit(work, *arguments, **options)
        return future

    def map(self, work: Callable[..., T], *columns: Iterable[Any]) -> Iterator[T]:  # type: ignore[override]
        """Call a function for each row of the columns, as the built-in `map` does.

        Args:
            work: a module-level function; its arguments and results must be picklable.
            *columns: the values of each argument.

        Returns:
            The results, in order. The calls start when the first result is requested; closing the iterator cancels
            the calls whose results were not requested.

        Raises:
            MeasurementError: workers died repeatedly over the same task, or none is left.
            Exception: any exception that a call raises.
        """
        rows = list(zip(*columns, strict=False))  # as in map, the shortest column ends the rows
        size = max(1, len(rows) // (_TASKS_A_THREAD * self._threads()))
        parts = deque(rows[start : start + size] for start in range(0, len(rows), size))
        futures: deque[DaskFuture] = deque()
        try:
            while futures or parts:
                if parts and (free := _TASKS_AHEAD * self._threads() - len(futures)) > 0:
                    some = [parts.popleft() for _ in range(min(free, len(parts)))]
                    futures.extend(self._client.map(partial(_call_each, work), some, pure=False))
                results = self._call(self._result, futures[0])
                futures.popleft()
                yield from results
        finally:
            if futures and self._client.status == "running":
                self._client.cancel(list(futures))

    def _threads(self) -> int:
        threads: int = sum(self._query(self._client.nthreads).values())
        return max(1, threads)

    def _result(self, future: DaskFuture) -> Any:
        while not future.done():
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=_LOOK_S)
            if self._client.status == "running" and not self._query(self._client.scheduler_info)["workers"]:
                raise MeasurementError(self._gone())
        return future.result()

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of Dask and convert Dask's errors to errors of one sentence."""
        from concurrent.futures import CancelledError

        from distributed.comm import CommClosedError
        from distributed.scheduler import KilledWorker, NoWorkerError

        try:
            return function(*arguments)
        except KilledWorker as error:
            raise MeasurementError(
                f"workers of {self._scheduler} died over the same work again and again: they may lack memory"
            ) from error
        except (CancelledError, CommClosedError, NoWorkerError) as error:
            raise MeasurementError(self._gone()) from error
        except ModuleNotFoundError as error:
            raise UsageError(
                f"the workers of {self._scheduler} have no {error.name}: install the same ringtap where they run"
            ) from error

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Query the scheduler itself; an OSError is then an error of the connection, not of a task."""
        try:
            return self._call(function, *arguments)
        except OSError as error:
            raise MeasurementError(self._gone()) from error

    def _gone(self) -> str:
        return f"the workers of {self._scheduler} are gone: start them again, then this command"
