"""One series of a sweep: a training job that runs while cross traffic is stepped, and the diagnosis of failures."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import add
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from ringtap.agents.clock.system_clock import SteadyClock
from ringtap.agents.hosts import HostProcess, Hosts
from ringtap.agents.sweep.cluster_hosts import check_alive, check_lost
from ringtap.agents.sweep.cross_traffic import STREAMS, CrossTraffic, free_port
from ringtap.agents.sweep.disturbances import (
    RECORDED_S,
    Change,
    Watch,
    collect_options,
    counted_bps,
    late_share,
    wait_for_samples,
)
from ringtap.agents.sweep.job_launch import RankProcess, processes, ranks_of
from ringtap.agents.sweep.link_payload import LinkPayload
from ringtap.agents.sweep.packet_capture import PacketCapture
from ringtap.agents.sweep.preflight import room_problem
from ringtap.agents.sweep.roles import SweepRoles
from ringtap.agents.sweep.tcp_reachability import check_reachability
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.ethernet import frame_bytes
from ringtap.core.iteration_ends import IterationEnds
from ringtap.core.run_files import open_regular
from ringtap.core.rundir import RunDirectory, clock_gap_ns, open_log
from ringtap.core.schema import ACKNOWLEDGED, AGENT_LOG, MARK_RECORD, MAX_LATE_SHARE, NIC_REC, VARIANTS
from ringtap.core.sweep_plan import SweepPlan, Testbed, Window
from ringtap.core.sweep_plan_cluster import Cluster
from ringtap.core.sweep_plan_models import Model
from ringtap.core.units import counted, format_rate

_TAIL_BYTES = 65_536
_MAX_MESSAGE_LENGTH = 300
_FIRST_HAND = 3  # score of a line that names a cause
# messages of a rank after another rank has ended, and of a launcher after a rank has ended
_SECOND_HAND = re.compile(
    r"closed by peer|reset by peer|broken pipe|timed out waiting|\bChildFailedError\b|elastic|SIGTERM|heartbeat|"
    r"store.*timeout|remote process exited",
    re.IGNORECASE,
)
# warnings, which jobs without a failure also print; those of glog begin with a letter and the date
_WARNING = re.compile(r"(\[rank\d+\]:)?\s*\[?[IW]\d{4} |\bwarning\b|Warning:", re.IGNORECASE)
_TELLING = re.compile(
    r"\w(Error|Exception|Interrupt)\b|\berror\b|no space left|disk quota|cannot|can't|not found|no such file|"
    r"refused|denied|out of memory|killed|no route|unreachable|timed out|failed|not recorded",
    re.IGNORECASE,
)


def telling_line(text: str) -> tuple[int, str]:
    """Return the line of an output that says most about a failure.

    Returns:
        A score (3: a cause; 2: a possible consequence of a failure elsewhere; 1: other output; 0: none), and the line.
    """
    # only printable characters are kept, as an output may contain anything
    printable = "".join(character if character.isprintable() else "\n" for character in text)
    lines = [" ".join(line.split()) for line in printable.splitlines() if line.strip()]
    causes = [line for line in lines if _TELLING.search(line) and not _WARNING.search(line)]
    first_hand = [line for line in causes if not _SECOND_HAND.search(line)]
    # the last cause is the error of the last traceback; a launcher's own output after it is second-hand
    for score, found in ((_FIRST_HAND, first_hand), (2, causes), (1, lines)):
        if found:
            return score, found[-1][:_MAX_MESSAGE_LENGTH]
    return 0, "no output"


def words_of_hosts(
    plan: SweepPlan, hosts: Hosts, run: RunDirectory, processes: Mapping[str, Sequence[HostProcess]]
) -> tuple[bool, str]:
    """Return the most telling output line of every host with its file, best first; equal lines are joined.

    Args:
        plan: the sweep.
        hosts: the hosts.
        run: run directory of the series.
        processes: processes that were started on each host.

    Returns:
        True if a host names a cause, and the text.
    """
    found: list[tuple[float, str, str, Path | None]] = []
    silent: list[str] = []
    for host, started in processes.items():
        lost = hosts.lost().get(host)
        full = "" if lost else _room(plan, hosts, host)
        if lost or full:
            found.append((4, host, lost or f"{full}: free some, then resume", None))
            continue
        logs = list(dict.fromkeys(process.log for process in started))
        candidates = [(*telling_line(_tail(log)), log) for log in logs]
        agent_log = run.node(host) / AGENT_LOG
        if (agent := telling_line(_tail(agent_log)))[0] > 1:  # at score 1, it only reports its start
            candidates.append((*agent, agent_log))
        best, line, log = max(candidates, key=lambda candidate: candidate[0])
        if not best:
            silent.append(host)
            continue
        ended = any(process.exit_code() not in (None, 0) for process in started)
        found.append((best + (0.5 if ended else 0), host, line, log))
    # a host whose process failed comes before hosts with the same score that still run
    found.sort(key=lambda item: -item[0])
    is_known = bool(found) and found[0][0] >= _FIRST_HAND
    by_line: dict[str, tuple[list[str], Path | None]] = {}
    for score, name, line, file in found:
        if not is_known or not 2 <= score < _FIRST_HAND:  # if a cause is known, its consequences are left out
            by_line.setdefault(line, ([], file))[0].append(name)
    texts = [f"{', '.join(names)}: {line}{f' ({file})' if file else ''}" for line, (names, file) in by_line.items()]
    if silent and not is_known:
        texts.append(f"no output from {', '.join(silent)}")
    return is_known, "; ".join(texts)


def _room(plan: SweepPlan, hosts: Hosts, host: str) -> str:
    """Return a message if the disk of a cluster's host is full, which may be why the host wrote no output."""
    return room_problem(plan, hosts, host) if isinstance(plan.topology, Cluster) else ""


def _tail(path: Path) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


_POLL_S = 0.05
_MASTER_PORTS = 2  # one for torch, and the next one for Horovod
# a job has stalled if no iteration ends for so many times the longest one, plus the delay of the logs
_STALLED_ITERATIONS = 3
_LOG_DELAY_S = 2.0
# trials of numbers of iperf streams: the load counts as reached from this share on, and a number that brings less than
# this share of the capacity more as useless
_REACHED_SHARE, _MIN_GAIN_SHARE = 0.97, 0.01
_TRIAL_SETTLE_S, _TRIAL_S = 1.0, 2.0
# iperf traffic below the one share of its load, while the bottleneck is used below the other one
_SLOW_SHARE, _ROOM_SHARE = 0.9, 0.75
# the counters of links are read during so many times the longest of so many recent iterations
_SAMPLED_ITERATIONS, _RECENT_ITERATIONS = 2.5, 6


@dataclass(frozen=True)
class Step:
    """Load step of a series.

    Attributes:
        index: position in the plan's loads; names the files of the step.
        load: requested load as a share of the capacity.
    """

    index: int
    load: float


class _RankEnds:
    """The records that end iterations of the training phase that a rank is in.

    Attributes:
        read: number of records that were read.
        ends: those that end an iteration.
    """

    def __init__(self) -> None:
        self.read = 0
        self.ends: list[tuple[Any, ...]] = []
        self._iteration_ends = IterationEnds[tuple[Any, ...]]()
        self._stretch = 0

    def add(self, records: Sequence[tuple[Any, ...]], optimizer: int, kind: int) -> None:
        """Add records; ``optimizer`` and ``kind`` are the numbers of these columns."""
        for record in records:
            ended = self._iteration_ends.add(record, record[optimizer], record[kind] == MARK_RECORD)
            if self._iteration_ends.stretch != self._stretch:
                self._stretch = self._iteration_ends.stretch
                self.ends.clear()
            if ended is not None:
                self.ends.append(ended)
        self.read += len(records)


class StepWatcher:
    """Reader of the growing step logs of a running job, rank by rank.

    Args:
        run: the job's run directory.
        ranks: number of ranks of each worker.
    """

    def __init__(self, run: RunDirectory, ranks: Mapping[str, int]) -> None:
        self._expected = ranks
        self._folders = [run.path / "nodes" / worker / "steps" for worker in ranks]
        self._ranks: dict[Path, _RankEnds] = {}
        self._columns: list[str] = []
        self._host_gaps_ns: dict[Path, int] = {}

    def iteration_ends_ns(self) -> list[int]:
        """Return the end of each iteration that all ranks have ended, at the slowest rank.

        The times, in ns, are what CLOCK_REALTIME would have shown if nobody had set it since the recording began.
        """
        ends_ns = self.ends_mono_ns()
        gaps_ns = self._gaps_ns() if ends_ns else []
        return [max(map(add, ends, gaps_ns)) for ends in ends_ns]

    def iteration_begins_ns(self) -> list[int]:
        """Return the begin of each iteration but the first: `iteration_ends_ns` and the pause after it."""
        ends_ns, pauses_ns = self.ends_mono_ns(), self._column("pause_ns")
        gaps_ns = self._gaps_ns() if ends_ns else []
        return [max(map(sum, zip(*each, gaps_ns, strict=True))) for each in zip(ends_ns, pauses_ns, strict=False)]

    def ends_mono_ns(self) -> list[tuple[int, ...]]:
        """Return the ends of each iteration that all ranks have ended, rank by rank (CLOCK_MONOTONIC of its host)."""
        return self._column("end_mono_ns")

    def _gaps_ns(self) -> list[int]:
        """Return what leads from CLOCK_MONOTONIC to the times of `iteration_ends_ns`, rank by rank."""
        for folder in self._folders:
            if folder not in self._host_gaps_ns and (gap_ns := clock_gap_ns(folder.parent)) is not None:
                self._host_gaps_ns[folder] = gap_ns
        wall, mono = map(self._columns.index, ("end_ns", "end_mono_ns"))
        # until the log of the interfaces has arrived, the first end of an iteration tells
        return [
            self._host_gaps_ns.get(path.parent, rank.ends[0][wall] - rank.ends[0][mono])
            for path, rank in self._ranks.items()
        ]

    def _column(self, name: str) -> list[tuple[int, ...]]:
        """Return a column of the step logs at the ends of iterations that all ranks have ended, rank by rank."""
        for folder in self._folders:
            for path in sorted(folder.glob("rank*.rec")):
                if path.suffixes == [".rec"] and path.stat().st_size:  # a new file may still lack its header
                    rank = self._ranks.setdefault(path, _RankEnds())
                    log = open_log(path)
                    self._columns = [field.name for field in log.fields]
                    rank.add(log.tail(rank.read), *map(self._columns.index, ("optimizer", "kind")))
        stepped = self.ranks_stepped()
        if any(stepped[worker] < count for worker, count in self._expected.items()):
            return []
        place = self._columns.index(name)
        ranks = [[row[place] for row in rank.ends] for rank in self._ranks.values()]
        return list(zip(*ranks, strict=False))

    def ranks_stepped(self) -> dict[str, int]:
        """Count the ranks of each worker that have stepped an optimizer, according to the logs read so far."""
        return {folder.parent.name: sum(path.parent == folder for path in self._ranks) for folder in self._folders}


def stalled_s(ends_ns: Sequence[int], now_ns: int) -> float:
    """Return the seconds since the last iteration ended if a job has stalled, otherwise 0.

    Args:
        ends_ns: ends of iterations (CLOCK_REALTIME, ns), at least two.
        now_ns: the present time.
    """
    since_ns = now_ns - ends_ns[-1]
    longest_ns = max(after - before for before, after in pairwise(ends_ns))
    return since_ns / 1e9 if since_ns > _STALLED_ITERATIONS * longest_ns + _LOG_DELAY_S * 1e9 else 0.0


class SeriesMeasurement:
    """Measurement of one model under one kind of cross traffic; a context manager that ends all its processes.

    Args:
        plan: the sweep.
        model: the training job.
        hosts: the hosts on which processes run.
        network: roles and addresses of the hosts.
        run: the job run directory, new and published.
        cross: the cross traffic.
        tolerant: if True, a window with traffic that is not the sweep's is not measured again.
        is_known: tells from the ends of a window's iterations whether their mean is known well enough; None: the
            plan's minima suffice.
        links: counts the payload of an iteration on each link, where there is no cross traffic; None: it is not
            counted.
    """

    def __init__(
        self,
        plan: SweepPlan,
        model: Model,
        hosts: Hosts,
        network: SweepRoles,
        run: RunDirectory,
        cross: CrossTraffic,
        *,
        tolerant: bool = False,
        is_known: Callable[[Sequence[int]], bool] | None = None,
        links: LinkPayload | None = None,
    ) -> None:
        self._is_known, self._links = is_known, links
        self._plan, self._model, self._workers = plan, model, network.roles.workers
        self._hosts, self._network, self._run, self._cross = hosts, network, run, cross
        self._watcher = StepWatcher(run, {host: ranks_of(plan, host) for host in self._workers})
        self._tolerant, self._is_testbed = tolerant, isinstance(plan.topology, Testbed)
        self._jobs: list[HostProcess] = []
        self._recorders: list[HostProcess] = []
        self._logs: dict[str, list[HostProcess]] = {}
        self._streams: dict[float, int] = {}  # of the iperf kind, by load
        self._clock = SteadyClock()
        self._change: Change | None = None  # within the try before of the present step

    def __enter__(self) -> SeriesMeasurement:
        """Start the recorders, the receiver and the job, and wait for the warm-up iterations.

        Raises:
            MeasurementError: a process ended or did not start in time.
        """
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the job, the traffic and the recorders; their logs are complete afterwards."""
        self._stop()

    def _start(self) -> None:
        for host in self._network.recorded:
            if host not in self._workers:
                self._recorders.append(self._start_agent(RankProcess(host, [], {}, "job.out", "recorder")))
        self._cross.start_receiver()
        self._watch = Watch(self._run.path, self._network, self._plan.capacity_bps, self._cross.port)
        first = self._workers[0]
        port = free_port(self._hosts, first, self._network.training[first], _MASTER_PORTS, self._network.ports)
        for process in processes(self._plan, self._model, self._network, self._hosts, port):
            self._jobs.append(self._start_agent(process))
        self._wait_for_warm_up()

    def _start_agent(self, process: RankProcess) -> HostProcess:
        host, command = process.host, process.command
        names = ("steps",) if self._is_testbed else ("sockets", "steps")
        collect = collect_options(self._network, host, *names)
        record = [*collect, "--join", self._hosts.path(host, self._run.path), "--node", host]
        verb = ["run" if command else "capture", *record]
        log = self._run.node(host) / "log" / process.log
        wrapped = [*self._hosts.ringtap(host), *verb, *(["--", *command] if command else [])]
        started = self._hosts.start(host, process.name, wrapped, log, environment=process.environment)
        self._logs.setdefault(host, []).append(started)
        return started

    def _wait_for_warm_up(self) -> None:
        timeout_s = self._plan.window.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while len(self._watcher.iteration_ends_ns()) <= self._plan.window.warmup_iterations:
            self._check()
            if time.monotonic() > deadline:
                is_known, reason = self._diagnose()
                question = "" if is_known else ": does it step an optimizer?"
                raise MeasurementError(
                    f"{self._model.title} made "
                    f"{counted(len(self._watcher.iteration_ends_ns()), 'iteration')} in {timeout_s:g} s, "
                    f"too few to warm up{question}{self._unstepped()}: {reason}"
                )
            time.sleep(_POLL_S)

    def _check(self) -> None:
        """Check that no host is lost and that the job, the recorders and the sender run."""
        check_lost(self._hosts)
        for process in (*self._jobs, *self._recorders):
            code = process.exit_code()
            if code is not None:
                raise MeasurementError(
                    f"{process.name} ended with exit code {code} before its series did: {self._diagnose()[1]}"
                )
        self._cross.check()

    def _unstepped(self) -> str:
        """Return text that lists the workers whose ranks have not all stepped an optimizer; empty if there are none."""
        stepped = self._watcher.ranks_stepped()
        ranks = {host: ranks_of(self._plan, host) for host in self._workers}
        missing = [f"{host} {stepped[host]} of {ranks[host]}" for host in self._workers if stepped[host] < ranks[host]]
        return f" (ranks that stepped an optimizer: {', '.join(missing)})" if missing else ""

    def _diagnose(self) -> tuple[bool, str]:
        """Diagnose a failure: return True if a cause is known, and the most telling output of every host."""
        with suppress(MeasurementError):
            self._hosts.gather(self._run.path)
        is_known, text = words_of_hosts(self._plan, self._hosts, self._run, self._logs)
        if is_known or self._hosts.lost() or not isinstance(self._plan.topology, Cluster):
            return is_known, text
        with suppress(MeasurementError):  # a firewall may have been set up meanwhile
            if blocked := check_reachability(self._network, self._hosts):
                return True, "; ".join(blocked)
        return is_known, text

    def measure(self, steps: Iterable[Step], tick: Callable[[float], None]) -> Iterator[tuple[dict[str, Any], bool]]:
        """Measure the load steps; a disturbed window is measured again, as often as the plan allows.

        Args:
            steps: the load steps, in order; each is taken when the one before has been measured.
            tick: called with the elapsed seconds of the present step, for a progress display.

        Yields:
            A record of points.jsonl, and True if it is kept as the least disturbed window of its step.

        Raises:
            MeasurementError: the job, a recorder or the sender ended, or a step gave no window of whole iterations.
        """
        for step in steps:
            tries: list[dict[str, Any]] = []
            self._change = None
            try:
                while not tries or (self._why_again(tries[-1]) and len(tries) <= self._plan.window.retries):
                    tries.append(self._try(step, len(tries), tick))
            except MeasurementError:
                for point in tries:
                    yield point | {"why": self._why_again(point)}, False
                raise
            best = min(tries, key=lambda item: (len(item["cut"]), len(item["others"]), float(item["late_share"])))
            for point in tries:
                if point is not best:
                    yield point | {"why": self._why_again(point)}, False
            yield best, True

    def _why_again(self, point: dict[str, Any]) -> str:
        """Return the reasons to measure a window again; empty if there are none."""
        found = [*point["cut"], *(() if self._tolerant else point["others"])]
        if self._is_testbed and point["late_share"] > MAX_LATE_SHARE:
            found.append(f"{point['late_share']:.1%} of the samples came late")
        return "; ".join(found)

    def _try(self, step: Step, attempt: int, tick: Callable[[float], None]) -> dict[str, Any]:
        """Measure one window of a load step and return its record."""
        window = self._plan.window
        requested_bps = step.load * self._plan.capacity_bps
        sent: dict[str, Any] = {}
        name = f"{step.index:03d}" + (f"-{attempt}" if attempt else "")
        is_captured = self._plan.capture is not None and step.load in self._plan.capture.loads
        duration_s = window.settle_s + (4 if is_captured else 2) * window.max_s + (40 if is_captured else 10)
        try:
            if requested_bps > 0:
                sent = self._start_cross_traffic(requested_bps, name, duration_s)
            if self._links and not requested_bps:
                self._sample_links(self._links)
            start_ns, end_ns, iterations = self._window(window, tick)
            if self._links and not requested_bps:
                self._sample_links(self._links)
                time.sleep(RECORDED_S)
                ends_ns = self._watcher.ends_mono_ns()
                sent |= self._links.per_iteration([(min(ends), max(ends)) for ends in ends_ns])
            time.sleep(self._network.period_s)  # the next sample of the counters still sees the same load
            if is_captured:  # after the window, whose iterations it would slow
                sent |= self._capture(name, tick)
        finally:
            self._cross.stop_sender()
        # a host without a link may not count as lost yet, and the pause would be taken for a long iteration
        check_alive(self._hosts)
        if self._is_known is not None:  # the next load is chosen by the logs
            time.sleep(RECORDED_S)
        wait_for_samples(self._hosts, self._run.path, end_ns)
        recorder = self._run.path / "nodes" / self._network.timekeeper / NIC_REC
        disturbance = self._watch.window(start_ns, end_ns, window.settle_s)
        within = self._within(start_ns, end_ns)
        if requested_bps and self._cross.kind == "iperf":  # the other kinds vary
            within += self._slow_link(requested_bps, start_ns, end_ns)
        if self._network.bottleneck["cross"] == ACKNOWLEDGED:  # the analysis reads other counters itself
            sent |= self._acknowledged(start_ns, end_ns)
        return {
            "series": self._model.series(self._cross.kind),
            "model": self._model.name,
            "traffic": self._cross.kind,
            **{name: getattr(self._model, name) for name in VARIANTS},
            "step": step.index,
            "requested_bps": round(requested_bps),
            "window_start_ns": start_ns,
            "window_end_ns": end_ns,
            "iterations": iterations,
            "ended": "enough" if iterations >= window.min_iterations else "time",
            "late_share": round(late_share(recorder, start_ns, end_ns), 4),
            "other_bps": None if disturbance.other_bps is None else round(disturbance.other_bps),
            "other_why": disturbance.other_why,
            "others": list(disturbance.others),
            "cut": [*disturbance.links, *within],
            **sent,
        }

    def _within(self, start_ns: int, end_ns: int) -> list[str]:
        """Return sentences about iterations of a window that stalled or changed.

        Raises:
            MeasurementError: they became longer in the try before, and stay so at the same load.
        """
        ends_ns = [end for end in self._watcher.iteration_ends_ns() if start_ns <= end <= end_ns]
        times_s = [(after - before) / 1e9 for before, after in pairwise(ends_ns)]
        before = self._change
        if before is not None and times_s and before.lasts(usual_s := median(times_s)):
            words = f"{before}, and still take {usual_s:.3g} s: a link or a host has become slower"
            if not self._tolerant:
                raise MeasurementError(f"{self._model.title}: at the same load, {words}: see to it, then resume")
            return [words]
        stall = self._watch.stall(ends_ns)
        self._change = None if stall else self._watch.change(ends_ns)
        return [*stall, *([] if self._change is None else [str(self._change)])]

    def _slow_link(self, requested_bps: float, start_ns: int, end_ns: int) -> list[str]:
        """Return a sentence if iperf traffic stayed below its load although the bottleneck had room.

        The check before the sweep has shown that the generator can load it.
        """
        bottleneck = self._network.bottleneck
        asked_bps = frame_bytes(requested_bps, 0, bottleneck["mtu"])
        share = self._watch.used(start_ns, end_ns) if bottleneck.get("carries_all", True) else None
        try:
            reached_bps = self._cross_bps(start_ns, end_ns)
        except UsageError:
            return []
        if share is None or share >= _ROOM_SHARE or reached_bps >= _SLOW_SHARE * asked_bps:
            return []
        reached = f"{format_rate(reached_bps)} of {format_rate(asked_bps)}"
        return [f"the cross traffic reached {reached} with the bottleneck {share:.0%} used: has a link become slower?"]

    def _sample_links(self, links: LinkPayload) -> None:
        """Read the counters of the links for some iterations."""
        ends_ns = self._watcher.iteration_ends_ns()[-_RECENT_ITERATIONS:]
        times_s = [(after - before) / 1e9 for before, after in pairwise(ends_ns)]
        links.sample(_SAMPLED_ITERATIONS * max(times_s, default=self._model.compute_s))

    def _capture(self, name: str, tick: Callable[[float], None]) -> dict[str, Any]:
        """Record packets for the plan's number of iterations under the present load; return its part of the point."""
        plan = self._plan
        assert plan.capture is not None
        wanted = Window(settle_s=0, min_s=0, min_iterations=plan.capture.iterations, max_s=plan.window.max_s)
        capture, span = PacketCapture(plan, self._hosts, self._network, self._run, name), (0, 0)
        try:
            try:
                capture.start()
                span = self._window(wanted, tick)[:2]
            finally:
                capture.stop()
            early_ns, why = capture.outcome()
        except MeasurementError as error:  # the point is measured all the same
            return {"packets_why": str(error)}
        span = (span[0], min(span[1], early_ns or span[1]))
        if span[1] <= span[0]:
            return {"packets_why": why}
        return {"packets_start_ns": span[0], "packets_end_ns": span[1], "packets_why": why}

    def _start_cross_traffic(self, requested_bps: float, name: str, duration_s: float) -> dict[str, Any]:
        """Start the sender of a load; return the number of streams of the iperf kind as a part of the point.

        Unless the plan gives the number, it rises from that of the next lighter load until the load is reached, or
        until more streams bring no more (thesis, section 3.2).
        """
        if self._cross.kind != "iperf":
            self._cross.start_sender(requested_bps, name, duration_s)
            return {}
        if self._plan.iperf_streams is not None:
            self._cross.start_sender(requested_bps, name, duration_s, self._plan.iperf_streams)
            return {"iperf_streams": self._plan.iperf_streams}
        first = max((number for bps, number in self._streams.items() if bps <= requested_bps), default=1)
        enough_bps = _REACHED_SHARE * frame_bytes(requested_bps, 0, self._network.bottleneck["mtu"])
        before_bps = 0.0
        for number in [number for number in STREAMS if number >= first]:
            self._cross.stop_sender()
            self._cross.start_sender(requested_bps, name, duration_s, number)
            reached_bps = self._trial_bps()
            if reached_bps >= enough_bps or reached_bps < before_bps + _MIN_GAIN_SHARE * self._plan.capacity_bps:
                break
            before_bps = reached_bps
        self._streams[requested_bps] = number
        return {"iperf_streams": number}

    def _trial_bps(self) -> float:
        """Return the rate of the cross traffic that was just started, in bit/s, as frames on the wire.

        Raises:
            MeasurementError: it was not counted, or a process ended.
        """
        time.sleep(_TRIAL_SETTLE_S)
        start_ns = self._clock.now_ns()
        time.sleep(max(_TRIAL_S, 3 * self._network.period_s))
        end_ns = self._clock.now_ns()
        time.sleep(RECORDED_S)
        self._check()
        self._hosts.gather(self._run.path)
        try:
            return self._cross_bps(start_ns, end_ns)
        except UsageError as error:
            raise MeasurementError(f"the iperf traffic could not be counted: {error}") from error

    def _cross_bps(self, start_ns: int, end_ns: int) -> float:
        """Return the rate of the cross traffic in a window, in bit/s, as frames on the wire.

        Raises:
            UsageError: it was not counted.
        """
        bottleneck = self._network.bottleneck
        if bottleneck["cross"] == ACKNOWLEDGED:
            return self._watch.rates(self._network.roles.cross_from, start_ns, end_ns).acknowledged_bps
        counters, path = bottleneck["cross"], self._run.path
        return sum(counted_bps(path, counter, bottleneck["mtu"], start_ns, end_ns) for counter in counters)

    def _acknowledged(self, start_ns: int, end_ns: int) -> dict[str, Any]:
        """Return the rate of the cross traffic that its receiver acknowledged, or why it is not known."""
        try:
            rates = self._watch.rates(self._network.roles.cross_from, start_ns, end_ns)
        except UsageError as error:
            return {"cross_bps": None, "cross_why": str(error)}
        return {"cross_bps": round(rates.acknowledged_bps), "cross_why": ""}

    def _window(self, window: Window, tick: Callable[[float], None]) -> tuple[int, int, int]:
        """Wait for a window of whole iterations; return its start and end, in ns, and their number.

        All times are as if no clock had been set since the series began.

        The window begins at the first end of an iteration after the settling time, and ends at the last one seen.
        """
        begin_s = time.monotonic()
        settled_ns = self._clock.now_ns() + round(window.settle_s * 1e9)
        while True:
            time.sleep(_POLL_S)
            tick(time.monotonic() - begin_s)
            self._check()
            ends = [end for end in self._watcher.iteration_ends_ns() if end >= settled_ns]
            spent_s = (self._clock.now_ns() - settled_ns) / 1e9
            seconds = (ends[-1] - ends[0]) / 1e9 if ends else 0.0
            enough = seconds >= window.min_s and len(ends) > window.min_iterations
            if window is self._plan.window and self._is_known is not None:  # a window of a point, not of packets
                enough = enough and self._is_known(ends)
            now_ns = self._clock.now_ns()
            if enough or (spent_s >= window.max_s and len(ends) > 1 and not stalled_s(ends, now_ns)):
                return ends[0], ends[-1], len(ends) - 1
            if spent_s >= 2 * window.max_s:
                raise self._no_window(spent_s, ends, now_ns, settled_ns)

    def _no_window(self, spent_s: float, ends: list[int], now_ns: int, since_ns: int) -> MeasurementError:
        """Return an error with the reason that there is no window of whole iterations."""
        self._hosts.gather(self._run.path)
        if len(ends) > 1:
            longest_s = max(after - before for before, after in pairwise(ends)) / 1e9
            what = f"no iteration for {stalled_s(ends, now_ns):.0f} s, where the longest before took {longest_s:.3g} s"
        else:
            what = f"no two iterations in {spent_s:.0f} s under this load"
        if cut := "; ".join(self._watch.links(since_ns, now_ns, since_ns)):
            return MeasurementError(f"{self._model.title} ended {what}: {cut}: see to the link, then resume")
        is_known, reason = self._diagnose()
        if len(ends) < 2 and not is_known:
            return MeasurementError(f"{self._model.title} ended {what}: raise window.max_time")
        return MeasurementError(f"{self._model.title} ended {what}: {reason}")

    def _stop(self) -> None:
        self._cross.stop_sender()
        for job in self._jobs:
            job.ask_to_stop(signal.SIGTERM)
        self._hosts.stop_all()
        self._hosts.gather(self._run.path)
