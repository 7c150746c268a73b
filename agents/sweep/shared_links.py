"""Several jobs that share links of a testbed: each alone, then all together, kept at time shifts or free.

Shifts are applied as by the agents of CASSINI (Rajasekaran, Ghobadi and Akella, NSDI 2024): an iteration may begin at
the points of its job's grid only, which the recording hook enforces by pauses between iterations.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringtap.agents.hook.ringtap_hook.grid import VARIABLE
from ringtap.agents.hosts import HostProcess, Hosts
from ringtap.agents.sweep.cluster_hosts import check_alive, check_lost
from ringtap.agents.sweep.cross_traffic import free_port
from ringtap.agents.sweep.disturbances import RECORDED_S, collect_options, late_share
from ringtap.agents.sweep.estimate import SharingStep, sharing_steps
from ringtap.agents.sweep.job_launch import processes
from ringtap.agents.sweep.load_series import StepWatcher, words_of_hosts
from ringtap.agents.sweep.roles import SweepRoles
from ringtap.agents.testbed.topology import SWITCH, JobShare, TestbedSpec
from ringtap.agents.testbed.up import RunningTestbed
from ringtap.errors import MeasurementError, UsageError
from ringtap.plan import SweepPlan
from ringtap.plan_jobs import CASSINI, CONGESTION_CONTROL, FREE, MLTCP, RULES, Job
from ringtap.records import JsonLinesWriter, read_json_lines
from ringtap.rundir import RunDirectory
from ringtap.schema import ALONE, MAX_LATE_SHARE, NIC_REC, SHARED, SHARED_JSONL
from ringtap.units import counted, format_duration

if TYPE_CHECKING:
    from ringtap.workload.interleaving import Link, PeriodicJob

# of the predicted period, so that iterations that last a little longer are not late for ever
GRID_MARGIN = 0.03
_MASTER_PORTS = 2
_POLL_S = 0.05


class _RunningJob(NamedTuple):
    """A job at a point: its run directory, the reader of its steps, and its processes, also by host."""

    job: Job
    run: RunDirectory
    watcher: StepWatcher
    processes: list[HostProcess]
    by_host: dict[str, list[HostProcess]]


class Grids(NamedTuple):
    """Times to which jobs are kept, and what is predicted of them.

    Attributes:
        shifts_s: shift of each job.
        periods_s: period of each job's grid.
        predicted_s: predicted iteration time of each job.
        score: compatibility score of the most contended link.
    """

    shifts_s: tuple[float, ...]
    periods_s: tuple[float, ...]
    predicted_s: tuple[float, ...]
    score: float


def pending_steps(plan: SweepPlan, run: Path) -> list[SharingStep]:
    """Return the points that have not been measured yet."""
    done = {point["step"] for point in read_json_lines(run / SHARED_JSONL, SHARED)[0]}
    return [step for step in sharing_steps(plan) if step.number not in done]


def sharing_line(run: Path, point: dict[str, Any]) -> str:
    """Return a line with the mean iteration time of each job at a point."""
    parts = []
    for job in point["jobs"]:
        path = run / job["directory"]
        ranks = {folder.name: 1 for folder in sorted((path / "nodes").iterdir()) if (folder / "steps").is_dir()}
        ends = StepWatcher(RunDirectory.open(path), ranks).iteration_ends_ns()
        inside = [end for end in ends if point["window_start_ns"] <= end <= point["window_end_ns"]]
        mean_s = (inside[-1] - inside[0]) / 1e9 / (len(inside) - 1)
        parts.append(f"{job['name']} {counted(len(inside) - 1, 'iteration')}, mean {mean_s:.4f} s")
    return f"{point['offset']:<10} {'; '.join(parts)}"


class SharedLinks:
    """Measurement of the points of a plan with jobs.

    Args:
        plan: the sweep.
        run: the sweep's run directory.
        hosts: the hosts of the testbed.
        network: their roles and addresses.
        testbed: the testbed.
        attempt: gives a new folder below series/ by its name.
        say: receives messages.
        tick: receives the present step and the seconds that it has run.
    """

    def __init__(
        self,
        plan: SweepPlan,
        run: RunDirectory,
        hosts: Hosts,
        network: SweepRoles,
        testbed: RunningTestbed,
        attempt: Callable[[str], Path],
        say: Callable[[str], None],
        tick: Callable[[str, float], None],
    ) -> None:
        self._plan, self._run, self._hosts = plan, run, hosts
        self._testbed, self._attempt, self._say, self._tick = testbed, attempt, say, tick
        self._points = run.path / SHARED_JSONL
        self._shared = [host for host in network.roles.workers if sum(host in job.workers for job in plan.jobs) > 1]
        self._ports = [
            {"node": SWITCH, "nic": TestbedSpec.port(host), "direction": direction}
            for host in self._shared
            for direction in ("rx", "tx")
        ]
        bottleneck = {"cross": [], "total": self._ports, "mtu": network.bottleneck["mtu"]}
        self._network = replace(network, bottleneck=bottleneck)

    def measure(self, steps: Sequence[SharingStep]) -> Iterator[dict[str, Any]]:
        """Measure points, and yield each as in shared.jsonl.

        Raises:
            UsageError: an offset is longer than an iteration, or jobs and links form a loop.
            MeasurementError: a job failed, or the jobs did not run at the same time.
        """
        if any(step.offset == CASSINI for step in steps):
            from ringtap.workload.interleaving import affinity_edges

            affinity_edges(self._links(self._plan.jobs), len(self._plan.jobs))
        points = JsonLinesWriter(self._points)
        try:
            for step in steps:
                point = self._measure(step, self._grids(step))
                points.append(point)
                yield point
        finally:
            points.close()

    def _grids(self, step: SharingStep) -> Grids | None:
        """Return the grids of a point by the recorded circles of the jobs; None if jobs are not kept.

        If jobs need more than a link has, their shifts are those on a circle that is longer by this factor.
        """
        if step.offset in (ALONE, FREE, *RULES):
            return None
        from ringtap.workload.interleaving import MEASURED_ERROR, draw_circles, schedule, score_with, slowdown

        jobs, links = self._recorded(step.jobs), self._links(step.jobs)
        circles = draw_circles(jobs, MEASURED_ERROR)
        if step.shifts_s is None:
            load = max(sum(circles.rates_bps[job].mean() for job in link.jobs) / link.capacity_bps for link in links)
            longer = [replace(job, period_ns=round(job.period_ns * max(load, 1.0))) for job in jobs]
            wider = draw_circles(longer, MEASURED_ERROR)
            shifts_s = tuple(slot * wider.quantum_s for slot in schedule(wider, links).shifts)
        else:
            shifts_s = step.shifts_s
            for job, shift_s in zip(jobs, shifts_s, strict=True):
                if shift_s * 1e9 >= job.period_ns:
                    raise UsageError(
                        f"offset {format_duration(shift_s)} of {job.name} is not below its iteration time alone, "
                        f"{format_duration(job.period_ns / 1e9)}: give a shift within an iteration"
                    )
        slots = [round(shift_s / circles.quantum_s) for shift_s in shifts_s]
        scores, factors = [], []
        for link in links:
            own = [slots[job] for job in link.jobs], [circles.rates_bps[job] for job in link.jobs]
            scores.append(score_with(*own, link.capacity_bps))
            of_link = replace(circles, rates_bps=tuple(own[1]))
            factors.append(slowdown(of_link, own[0], link.capacity_bps))
        # no job is faster than alone
        factor = max(factors) / (1 + min(circles.period_errors))
        predicted_s = tuple(len(rates) * circles.quantum_s * factor for rates in circles.rates_bps)
        periods_s = tuple(period_s * (1 + GRID_MARGIN) for period_s in predicted_s)
        return Grids(shifts_s, periods_s, predicted_s, min(scores))

    def _recorded(self, jobs: Sequence[Job]) -> list[PeriodicJob]:
        """Return the communication of jobs as recorded alone."""
        from ringtap.workload.recorded_job import recorded_job

        points = read_json_lines(self._points, SHARED)[0]
        alone = {point["jobs"][0]["name"]: point for point in points if point["offset"] == ALONE}
        found = []
        for job in jobs:
            point = alone[job.name]
            window_ns = point["window_start_ns"], point["window_end_ns"]
            found.append(recorded_job(self._run.path / point["jobs"][0]["directory"], job.name, window_ns))
        return found

    def _links(self, jobs: Sequence[Job]) -> list[Link]:
        """Return the links that jobs share; one whose jobs all share another link, too, adds nothing."""
        from ringtap.workload.interleaving import Link

        users = {
            tuple(number for number, job in enumerate(jobs) if host in job.workers): host
            for host in self._network.roles.workers
        }
        return [
            Link(host, float(self._plan.capacity_bps), numbers)
            for numbers, host in users.items()
            if len(numbers) > 1 and not any(set(numbers) < set(others) for others in users)
        ]

    def _measure(self, step: SharingStep, grids: Grids | None) -> dict[str, Any]:
        label = step.label
        start_ns = time.time_ns()
        facts: dict[str, Any] = {}
        shares = self._shares(step)
        running = [self._create(step, job) for job in step.jobs]
        try:
            self._tick(f"{label}: starting the jobs", 0.0)
            # until all jobs run, they share links equally
            self._share([JobShare(congestion_control=share.congestion_control) for share in shares], step.offset)
            self._start_on(running[0], SWITCH, ["capture"], [], {}, "recorder.out")
            for number, one in enumerate(running):
                grid = {}
                if grids is not None:
                    begin_ns, period_ns = (round(each[number] * 1e9) for each in (grids.shifts_s, grids.periods_s))
                    grid = {VARIABLE: f"{start_ns + begin_ns},{period_ns}"}
                self._start_job(one, grid)
            self._wait_for_warm_up(running)
            if step.offset in (FREE, *RULES):
                self._share(shares, step.offset)
                facts["rule_ns"] = time.time_ns()
                self._check_congestion_controls(shares)
            window = self._undisturbed(label, running)
        except BaseException as error:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__
            for one in running:
                one.run.finish("partial", why)
            raise
        finally:
            self._stop(running)
            cost = self._share([JobShare()] * len(self._plan.jobs))
        for one in running:
            one.run.finish("complete")
        jobs: list[dict[str, Any]] = []
        for number, one in enumerate(running):
            jobs.append({"name": one.job.name, "directory": str(one.run.path.relative_to(self._run.path))})
            if grids is not None:
                jobs[-1] |= {"shift_s": grids.shifts_s[number], "period_s": grids.periods_s[number]}
                jobs[-1] |= {"predicted_s": grids.predicted_s[number]}
            elif step.offset in RULES:
                jobs[-1]["share"] = shares[number]._asdict()
        facts |= {} if grids is None else {"score": grids.score}
        facts |= {"share_changes": cost} if cost else {}
        point = {"step": step.number, "offset": step.offset, **window, **facts, "ports": self._ports, "jobs": jobs}
        if "rule_ns" in facts:
            self._predict(point, running, shares)
        return point

    def _shares(self, step: SharingStep) -> list[JobShare]:
        """Return the share of each job of the plan at a point."""
        jobs = self._plan.jobs
        if step.offset not in RULES:
            return [JobShare()] * len(jobs)
        from ringtap.agents.sweep.job_shares import shares_of

        return shares_of(step.offset, jobs, self._recorded(jobs), self._plan.capacity_bps)

    def _share(self, shares: Sequence[JobShare], offset: str = "") -> dict[str, float]:
        """Give jobs their shares by classes at the ends of shared links, if the rule of a point needs these."""
        hosts = {
            host: [number for number, job in enumerate(self._plan.jobs) if host in job.workers] for host in self._shared
        }
        has_classes = offset in RULES and offset != CONGESTION_CONTROL
        return self._testbed.share(hosts if has_classes else {}, shares)

    def _check_congestion_controls(self, shares: Sequence[JobShare]) -> None:
        """Check that the connections of jobs have the congestion control that the rule gives them."""
        if not any(share.congestion_control for share in shares):
            return
        found = self._testbed.congestion_controls()
        for job, share, names in zip(self._plan.jobs, shares, found, strict=True):
            if share.congestion_control and set(names) != {share.congestion_control}:
                raise MeasurementError(
                    f"connections of {job.name} use {', '.join(names) or 'no'} congestion control instead of "
                    f"{share.congestion_control}: does the job choose one itself?"
                )

    def _predict(self, point: dict[str, Any], running: Sequence[_RunningJob], shares: Sequence[JobShare]) -> None:
        """Add to a free point what the fluid model predicts of it from the begin of its rule on, or why it does not."""
        if point["offset"] == CONGESTION_CONTROL:
            point["predicted_why"] = "the fluid model knows no congestion control"
            return
        if [link.jobs for link in self._links(self._plan.jobs)] != [tuple(range(len(running)))]:
            point["predicted_why"] = "the fluid model has one link, and these jobs share several"
            return
        from ringtap.agents.sweep.job_shares import mltcp_phases, predicted_begins_s

        rule_ns, alone = point["rule_ns"], self._recorded(self._plan.jobs)
        window_s = [(point[f"window_{side}_ns"] - rule_ns) / 1e9 for side in ("start", "end")]
        starts_s = [
            (max(end for end in one.watcher.iteration_ends_ns() if end <= rule_ns) - rule_ns) / 1e9 for one in running
        ]
        capacity_bps = self._plan.capacity_bps
        predicted = predicted_begins_s(alone, shares, starts_s, capacity_bps, window_s[1])
        for job, begins_s in zip(point["jobs"], predicted, strict=True):
            job["predicted_begin_ns"] = [rule_ns + round(begin_s * 1e9) for begin_s in begins_s]
            inside = [begin_s for begin_s in begins_s if begin_s >= window_s[0]]
            if len(inside) > 1:
                job["predicted_s"] = (inside[-1] - inside[0]) / (len(inside) - 1)
        if point["offset"] == MLTCP and (phases := mltcp_phases(alone, starts_s, len(predicted[1]))):
            point["jobs"][1]["mltcp_phases"] = phases

    def _create(self, step: SharingStep, job: Job) -> _RunningJob:
        """Create the run directory of a job at a point."""
        path = self._attempt(f"{step.offset}-{job.name}")
        facts = self._network.clock() | {"batch": job.model.batch, "bottleneck": self._network.bottleneck}
        run = RunDirectory.create(path, "job", sys.argv, self._plan.seed, **facts)
        self._hosts.publish(path)
        return _RunningJob(job, run, StepWatcher(run, dict.fromkeys(job.workers, 1)), [], {})

    def _start_job(self, one: _RunningJob, grid: dict[str, str]) -> None:
        """Start the ranks of a job."""
        workers, spec, number = one.job.workers, self._testbed.state.spec, self._plan.jobs.index(one.job)
        network = replace(
            self._network,
            roles=replace(self._network.roles, workers=workers),
            training={host: spec.job_ip(host, number) for host in workers},
            interface=dict.fromkeys(workers, spec.job_nic(number)),
        )
        port = free_port(self._hosts, workers[0], network.training[workers[0]], _MASTER_PORTS)
        for process in processes(self._plan, one.job.model, network, self._hosts, port):
            environment = process.environment | grid
            self._start_on(one, process.host, ["run"], process.command, environment, process.log)

    def _start_on(
        self, one: _RunningJob, host: str, verb: list[str], command: list[str], environment: dict[str, str], file: str
    ) -> None:
        """Start a recorder on a host, with a rank of the job if there is a command."""
        record = collect_options(self._network, host, *(["steps", "ddp"] if command else []))
        record += ["--join", self._hosts.path(host, one.run.path), "--node", host]
        wrapped = [*self._hosts.ringtap(host), *verb, *record, *(["--", *command] if command else [])]
        log = one.run.node(host) / "log" / file
        name = one.job.name if command else "recorder"
        process = self._hosts.start(host, name, wrapped, log, environment=environment)
        one.processes.append(process)
        one.by_host.setdefault(host, []).append(process)

    def _wait_for_warm_up(self, running: Sequence[_RunningJob]) -> None:
        window = self._plan.window
        deadline_s = time.monotonic() + window.start_timeout_s
        while slow := [one for one in running if len(one.watcher.iteration_ends_ns()) <= window.warmup_iterations]:
            self._check(running)
            if time.monotonic() > deadline_s:
                made = counted(len(slow[0].watcher.iteration_ends_ns()), "iteration")
                raise MeasurementError(
                    f"{slow[0].job.name} made {made} in {window.start_timeout_s:g} s, too few to warm up: "
                    f"{self._reason(slow[0])}"
                )
            time.sleep(_POLL_S)

    def _check(self, running: Sequence[_RunningJob]) -> None:
        """Check that no host is lost, and that all jobs and recorders run."""
        check_lost(self._hosts)
        for one in running:
            for process in one.processes:
                if (code := process.exit_code()) is not None:
                    raise MeasurementError(
                        f"{process.name} ended with exit code {code} before its point did: {self._reason(one)}"
                    )

    def _reason(self, one: _RunningJob) -> str:
        self._hosts.gather(one.run.path)
        return words_of_hosts(self._plan, self._hosts, one.run, one.by_host)[1]

    def _undisturbed(self, label: str, running: Sequence[_RunningJob]) -> dict[str, Any]:
        """Measure windows until the recorder was in time in one, or up to the plan's retries; return the best one."""
        tries: list[dict[str, Any]] = []
        while len(tries) <= self._plan.window.retries:
            start_ns, end_ns = self._window(label, running)
            time.sleep(RECORDED_S)
            check_alive(self._hosts)
            for one in running:
                self._hosts.gather(one.run.path)
            late = late_share(running[0].run.node(SWITCH) / NIC_REC, start_ns, end_ns)
            tries.append({"window_start_ns": start_ns, "window_end_ns": end_ns, "late_share": round(late, 4)})
            if late <= MAX_LATE_SHARE:
                break
            self._say(f"{label}: {late:.1%} of the samples came late")
        return min(tries, key=lambda item: float(item["late_share"]))

    def _window(self, label: str, running: Sequence[_RunningJob]) -> tuple[int, int]:
        """Wait for a window with whole iterations of all jobs; return its start and end (CLOCK_REALTIME, ns)."""
        window, begin_s = self._plan.window, time.monotonic()
        settled_ns = time.time_ns() + round(window.settle_s * 1e9)
        while True:
            time.sleep(_POLL_S)
            self._tick(label, time.monotonic() - begin_s)
            self._check(running)
            ends = [[end for end in one.watcher.iteration_ends_ns() if end >= settled_ns] for one in running]
            fewest = min(map(len, ends))
            spent_s = (time.time_ns() - settled_ns) / 1e9
            if fewest > 1:
                start_ns, end_ns = max(each[0] for each in ends), min(each[-1] for each in ends)
                enough = (end_ns - start_ns) / 1e9 >= window.min_s and fewest > window.min_iterations
                if start_ns < end_ns and (enough or spent_s >= window.max_s):
                    return start_ns, end_ns
            if spent_s >= 2 * window.max_s:
                slow = running[min(range(len(ends)), key=lambda number: len(ends[number]))]
                raise MeasurementError(
                    f"{label}: the jobs had no window in common in {spent_s:.0f} s: {slow.job.name} made "
                    f"{counted(fewest, 'iteration')}: raise window.max_time, or see {slow.run.path}"
                )

    def _stop(self, running: Sequence[_RunningJob]) -> None:
        for one in running:
            for process in one.processes:
                process.ask_to_stop(signal.SIGTERM)
        self._hosts.stop_all()
        for one in running:
            self._hosts.gather(one.run.path)
