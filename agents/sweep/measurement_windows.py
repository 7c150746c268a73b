"""Measures windows of whole iterations of one or several jobs that run at the same time: start, window and retry."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

from ringtap.agents.clock.local_clock import SteadyClock
from ringtap.agents.hosts import HostProcess, Hosts
from ringtap.agents.sweep.cross_traffic import free_port
from ringtap.agents.sweep.detect_disturbances import (
    RECORDED_S,
    Change,
    Watch,
    late_share,
    wait_for_samples,
)
from ringtap.agents.sweep.host_connections import check_alive, check_lost
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.agents.sweep.job_failure_cause import failure_messages
from ringtap.agents.sweep.job_launch_commands import RankProcess, processes, recorded
from ringtap.agents.sweep.step_watcher import StepWatcher, stalled_s
from ringtap.agents.sweep.tcp_reachability import check_reachability
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import MAX_LATE_SHARE, NIC_REC
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.sweep_plan import SweepPlan, Testbed, Window
from ringtap.core.sweep_plans.training_jobs import Model
from ringtap.core.units import counted

_POLL_S = 0.05
_MASTER_PORTS = 2  # one for torch, and the next one for Horovod


class WindowSpan(NamedTuple):
    """Window with whole iterations of all jobs.

    Attributes:
        start_ns: its start, as if no clock had been set since the jobs began.
        end_ns: its end, likewise.
        iterations: whole iterations in it, of the job with the fewest.
    """

    start_ns: int
    end_ns: int
    iterations: int


@dataclass
class MeasuredJob:
    """A job that is measured.

    Attributes:
        model: what trains; its title names the job in messages.
        network: roles and addresses of its hosts.
        run: its run directory, new and published.
        watch: detector of disturbances in the run.
        steps: reader of its steps.
        observed: hosts on which the run records connections.
        recorders: nodes that the run records beside the workers.
        variables: environment variables of its ranks in addition to those of the plan, by host.
        processes: its ranks and recorders by host, once they have been started.
    """

    model: Model
    network: SweepRoles
    run: RunDirectory
    watch: Watch
    steps: StepWatcher
    observed: Collection[str]
    recorders: Sequence[str]
    variables: Mapping[str, dict[str, str]] = field(default_factory=dict)
    processes: dict[str, list[HostProcess]] = field(default_factory=dict)

    def made(self) -> int:
        """Return the number of iterations that it has made."""
        return len(self.steps.iteration_ends_ns())

    def ends_ns(self, span: WindowSpan) -> list[int]:
        """Return the ends of its iterations in a window."""
        return [end for end in self.steps.iteration_ends_ns() if span.start_ns <= end <= span.end_ns]


class Condition:
    """Condition under which a window is measured; this one demands nothing but that the jobs run.

    Attributes:
        is_known: tells from the ends of iterations whether they suffice; None: the plan's minima do.
    """

    is_known: Callable[[Sequence[int]], bool] | None = None

    def begin(self, attempt: int) -> None:
        """Establish it for a window; ``attempt`` counts the windows of a point."""

    def check(self) -> None:
        """Raise a `MeasurementError` if it no longer holds."""

    def record(self, record: dict[str, Any], tick: Callable[[float], None]) -> None:
        """Measure more after a window, while it still holds, and add it to the window's record."""

    def end(self) -> None:
        """End what `begin` established."""

    def examine(self, record: dict[str, Any]) -> None:
        """Add to a window's record what its samples tell of it: facts, and under ``cut`` what disturbed it."""


class JobWindows:
    """Measurement of windows of jobs that run at the same time.

    Args:
        plan: the sweep.
        hosts: the hosts on which processes run.
        condition: what holds while a window is measured.
        collectors: what is recorded of ranks beside their interfaces and connections.
        tolerant: if True, a window with traffic that is not the sweep's is not measured again.

    Attributes:
        jobs: the jobs that run.
        clock: the clock by which windows are timed.
    """

    def __init__(
        self,
        plan: SweepPlan,
        hosts: Hosts,
        condition: Condition,
        collectors: Sequence[str] = ("steps",),
        *,
        tolerant: bool = False,
    ) -> None:
        self._plan, self._hosts, self._condition, self._collectors = plan, hosts, condition, collectors
        self._is_testbed, self._tolerant = isinstance(plan.topology, Testbed), tolerant
        self.clock = SteadyClock()
        self._change: Change | None = None  # within the try before of the present point
        self.jobs: Sequence[MeasuredJob] = ()

    def start(self, jobs: Sequence[MeasuredJob]) -> None:
        """Start the recorders and the ranks of jobs, and wait for the warm-up iterations of all.

        Raises:
            MeasurementError: a process ended, or did not start in time.
        """
        self.jobs = jobs
        for job, port in zip(jobs, self._free_ports(), strict=True):
            for node in job.recorders:
                self._start_process(job, RankProcess(node, [], {}, "recorder.out", "recorder"))
            for process in processes(self._plan, job.model, job.network, self._hosts, port):
                self._start_process(job, process)
        self.wait_for_iterations(self._plan.window.warmup_iterations + 1)

    def _free_ports(self) -> list[int]:
        """Return the first free port of each job's first worker, before any of the jobs has begun to take its own."""
        firsts = [(job.network.roles.workers[0], job.network) for job in self.jobs]
        places = [(host, network.training[host]) for host, network in firsts]
        count, among = _MASTER_PORTS * len(places), self.jobs[0].network.ports
        free = {place: free_port(self._hosts, *place, count, among) for place in dict.fromkeys(places)}
        return [free[place] + _MASTER_PORTS * number for number, place in enumerate(places)]

    def _start_process(self, job: MeasuredJob, process: RankProcess) -> None:
        """Start a rank of a job with its recorder, or a recorder alone if there is no command."""
        host, command = process.host, process.command
        collectors = [*([] if self._is_testbed else ["sockets"]), *(self._collectors if command else ())]
        wrapped = recorded(self._hosts, job.run, job.network, host, collectors, command)
        log = job.run.node(host) / "log" / process.log
        environment = process.environment | (job.variables.get(host, {}) if command else {})
        started = self._hosts.start(host, process.name, wrapped, log, environment=environment)
        job.processes.setdefault(host, []).append(started)

    def wait_for_iterations(self, count: int) -> None:
        """Wait until each job has made so many more iterations.

        Raises:
            MeasurementError: a process ended, or a job takes longer than the plan's ``start_timeout``.
        """
        timeout_s = self._plan.window.start_timeout_s
        deadline_s = time.monotonic() + timeout_s
        least = [job.made() + count for job in self.jobs]
        while slow := [job for job, number in zip(self.jobs, least, strict=True) if job.made() < number]:
            self.check()
            if time.monotonic() > deadline_s:
                is_known, reason = self._diagnose(slow[0])
                question = "" if is_known else ": does it step an optimizer?"
                unstepped = ", ".join(slow[0].steps.unstepped())
                missing = f" (ranks that stepped an optimizer: {unstepped})" if unstepped else ""
                raise MeasurementError(
                    f"{slow[0].model.title} made {counted(slow[0].made(), 'iteration')} in {timeout_s:g} s, "
                    f"too few to warm up{question}{missing}: {reason}"
                )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Check that no host is lost, that the jobs and the recorders run, and that the condition holds."""
        check_lost(self._hosts)
        for job in self.jobs:
            for process in chain.from_iterable(job.processes.values()):
                if (code := process.exit_code()) is not None:
                    advice = "" if code else " (give it a command that runs until it is ended)"
                    raise MeasurementError(
                        f"{process.name} ended with exit code {code} before its measurement did{advice}: "
                        f"{self._diagnose(job)[1]}"
                    )
        self._condition.check()

    def _diagnose(self, job: MeasuredJob) -> tuple[bool, str]:
        """Diagnose a failure: return True if a cause is known, and the most telling output of every host."""
        with suppress(MeasurementError):
            self._hosts.gather(job.run.path)
        is_known, text = failure_messages(self._plan, self._hosts, job.run, job.processes)
        if is_known or self._hosts.lost() or not isinstance(self._plan.topology, Cluster):
            return is_known, text
        with suppress(MeasurementError):  # a firewall may have been set up meanwhile
            if blocked := check_reachability(job.network, self._hosts):
                return True, "; ".join(blocked)
        return is_known, text

    def measure(self, tick: Callable[[float], None]) -> Iterator[tuple[dict[str, Any], bool]]:
        """Measure a window; a disturbed one is measured again, as often as the plan allows.

        Args:
            tick: called with the elapsed seconds of the present window, for a progress display.

        Yields:
            The record of each window, and True for the least disturbed one, which comes last.

        Raises:
            MeasurementError: a process ended, or there was no window of whole iterations of all jobs.
        """
        tries: list[dict[str, Any]] = []
        self._change = None
        try:
            while not tries or (self._why_again(tries[-1]) and len(tries) <= self._plan.window.retries):
                tries.append(self._try(len(tries), tick))
        except MeasurementError:
            for record in tries:
                yield record | {"why": self._why_again(record)}, False
            raise
        best = min(tries, key=lambda item: (len(item["cut"]), len(item["others"]), float(item["late_share"])))
        for record in tries:
            if record is not best:
                yield record | {"why": self._why_again(record)}, False
        yield best, True

    def _why_again(self, record: dict[str, Any]) -> str:
        """Return the reasons to measure a window again; empty if there are none."""
        found = [*record["cut"], *(() if self._tolerant else record["others"])]
        if self._is_testbed and record["late_share"] > MAX_LATE_SHARE:
            found.append(f"{record['late_share']:.1%} of the samples came late")
        return "; ".join(found)

    def _try(self, attempt: int, tick: Callable[[float], None]) -> dict[str, Any]:
        """Measure one window and return its record."""
        window, condition, first = self._plan.window, self._condition, self.jobs[0]
        more: dict[str, Any] = {}
        try:
            condition.begin(attempt)
            span = self.window(window, tick, condition.is_known)
            time.sleep(first.network.period_s)  # the next sample of the counters still sees the same condition
            condition.record(more, tick)
        finally:
            condition.end()
        # a host without a link may not count as lost yet, and the pause would be taken for a long iteration
        check_alive(self._hosts)
        time.sleep(RECORDED_S)
        for job in self.jobs:
            wait_for_samples(self._hosts, job.run.path, span.end_ns)
        recorder = first.run.path / "nodes" / first.network.timekeeper / NIC_REC
        since_ns = span.start_ns - round(window.settle_s * 1e9)
        cut = [words for job in self.jobs for words in job.watch.links(since_ns, span.end_ns, span.start_ns)]
        watches = [(job.watch, job.observed) for job in self.jobs]
        record = {
            "window_start_ns": span.start_ns,
            "window_end_ns": span.end_ns,
            "iterations": span.iterations,
            "ended": "enough" if span.iterations >= window.min_iterations else "time",
            "late_share": round(late_share(recorder, span.start_ns, span.end_ns), 4),
            "others": first.watch.others(watches, span.start_ns, span.end_ns),
            "cut": [*dict.fromkeys(cut), *self._within(span)],
            **more,
        }
        condition.examine(record)
        return record

    def _within(self, span: WindowSpan) -> list[str]:
        """Return sentences about iterations of a window that stalled or changed.

        Several jobs explain changes of each other's iterations, so that only those of a lone job count.

        Raises:
            MeasurementError: they became longer in the try before, and stay so under the same condition.
        """
        first = self.jobs[0]  # its run has the counters of the links
        if len(self.jobs) > 1:
            return [
                f"{job.model.title}: {words}" for job in self.jobs for words in first.watch.stall(job.ends_ns(span))
            ]
        ends_ns = first.ends_ns(span)
        times_s = [(after - before) / 1e9 for before, after in pairwise(ends_ns)]
        before = self._change
        if before is not None and times_s and before.lasts(usual_s := median(times_s)):
            words = f"{before}, and still take {usual_s:.3g} s: a link or a host has become slower"
            if not self._tolerant:
                raise MeasurementError(f"{first.model.title}: at the same load, {words}: see to it, then resume")
            return [words]
        stall = first.watch.stall(ends_ns)
        self._change = None if stall else first.watch.change(ends_ns)
        return [*stall, *([] if self._change is None else [str(self._change)])]

    def window(
        self,
        window: Window,
        tick: Callable[[float], None],
        is_known: Callable[[Sequence[int]], bool] | None = None,
    ) -> WindowSpan:
        """Wait for a window of whole iterations of all jobs.

        It begins where each job has ended an iteration after the settling time, and ends at the last one seen of the
        job that is behind.

        Args:
            window: the conditions that it meets.
            tick: called with the elapsed seconds.
            is_known: tells from the ends of the first job's iterations in it whether they suffice; None: they do.

        Raises:
            MeasurementError: a process ended, or there was no such window in time.
        """
        begin_s = time.monotonic()
        settled_ns = self.clock.now_ns() + round(window.settle_s * 1e9)
        while True:
            time.sleep(_POLL_S)
            tick(time.monotonic() - begin_s)
            self.check()
            ends = [[end for end in job.steps.iteration_ends_ns() if end >= settled_ns] for job in self.jobs]
            now_ns = self.clock.now_ns()
            spent_s = (now_ns - settled_ns) / 1e9
            if all(ends):
                start_ns, end_ns = max(each[0] for each in ends), min(each[-1] for each in ends)
                within = [[end for end in each if start_ns <= end <= end_ns] for each in ends]
                fewest = min(map(len, within)) - 1
                enough = (end_ns - start_ns) / 1e9 >= window.min_s and fewest >= window.min_iterations
                late = spent_s >= window.max_s and fewest > 0 and not any(stalled_s(each, now_ns) for each in ends)
                if late or (enough and (is_known is None or is_known(within[0]))):
                    return WindowSpan(start_ns, end_ns, fewest)
            if spent_s >= 2 * window.max_s:
                raise self._no_window(spent_s, ends, now_ns, settled_ns)

    def _no_window(self, spent_s: float, ends: Sequence[Sequence[int]], now_ns: int, since_ns: int) -> MeasurementError:
        """Return an error with the reason that there is no window of whole iterations of all jobs."""
        number = min(range(len(ends)), key=lambda number: (len(ends[number]) > 1, ends[number][-1:]))
        job, own = self.jobs[number], ends[number]
        self._hosts.gather(job.run.path)
        pause_s = stalled_s(own, now_ns) if len(own) > 1 else 0.0
        if pause_s:
            longest_s = max(after - before for before, after in pairwise(own)) / 1e9
            what = f"no iteration for {pause_s:.0f} s, where the longest before took {longest_s:.3g} s"
        else:
            what = f"no two iterations in {spent_s:.0f} s{'' if len(ends) == 1 else ' that all jobs have in common'}"
        if cut := "; ".join(job.watch.links(since_ns, now_ns, since_ns)):
            return MeasurementError(f"{job.model.title} ended {what}: {cut}: see to the link, then resume")
        is_known, reason = self._diagnose(job)
        if not pause_s and not is_known:
            return MeasurementError(f"{job.model.title} ended {what}: raise window.max_time")
        return MeasurementError(f"{job.model.title} ended {what}: {reason}")


def remarks(name: str, record: Mapping[str, Any], *, is_kept: bool) -> list[str]:
    """Return messages about a window: why it was measured again, or what disturbed it although it is kept."""
    if not is_kept:
        return [f"{name}: measured again: {record['why']}"]
    return [f"warning: {name}: {problem}" for problem in (*record["cut"], *record["others"])]
