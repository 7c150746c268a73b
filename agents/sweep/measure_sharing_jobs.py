"""Measures jobs that share links of a testbed or cluster: each alone, then all together, kept at time shifts or free.

On a testbed, the links are those on the paths that jobs have at a point. On a cluster, they are the links of hosts.

Shifts are applied as by the agents of CASSINI (Rajasekaran, Ghobadi and Akella, NSDI 2024): an iteration may begin at
the points of its job's grid only, which the recording hook enforces by pauses between iterations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringtap.agents.hook.ringtap_hook.iteration_time_shift import VARIABLE
from ringtap.agents.hosts import Hosts
from ringtap.agents.sweep.choose_network_paths import (
    UsedLink,
    crux_paths,
    flow_capacity_bps,
    limiting_links,
    random_paths,
    used_links,
)
from ringtap.agents.sweep.clock_offsets import ClockOffset, clock_offsets
from ringtap.agents.sweep.detect_disturbances import Watch
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.agents.sweep.job_launch_commands import job_run, ranks_of
from ringtap.agents.sweep.measurement_windows import Condition, JobWindows, MeasuredJob, remarks
from ringtap.agents.sweep.step_watcher import StepWatcher
from ringtap.agents.sweep.sweep_estimate import SharingStep, sharing_steps
from ringtap.agents.testbed.shortest_path_routes import path_count
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import JobShare
from ringtap.core.append_only_logs import JsonLinesWriter, read_json_lines
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.link_counter_sources import nic_counter
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import ALONE, SHARED, SHARED_JSONL
from ringtap.core.sweep_plans.jobs_that_share import (
    CASSINI,
    CONGESTION_CONTROL,
    CRUX,
    MLTCP,
    RULES,
    WORST,
    SharingJob,
    sharing,
)
from ringtap.core.sweep_plans.sweep_plan import SharingPlan
from ringtap.core.units import counted, format_duration

if TYPE_CHECKING:
    from ringtap.workload.interleaving import InterleavedLink, PeriodicJob

# of the predicted period, so that iterations that last a little longer are not late for ever
GRID_MARGIN = 0.03
# of this margin, so that two hosts whose clocks are wrong in opposite directions use it up at most
_MAX_CLOCK_ERROR = 0.5
HELD_ITERATIONS = 5  # at the shifts from which jobs slide, before they are released
_BEGUN = 0.1  # of a period: after the grid's point, and mostly before a job communicates
_RELEASED = "released"  # file in the run directory of the first job, which ends the grids of all
_OF_WINDOW = ("window_start_ns", "window_end_ns", "late_share", "cut", "others")


class Grids(NamedTuple):
    """Times to which jobs are kept, and what is predicted of them.

    Attributes:
        shifts_s: shift of each job.
        periods_s: period of each job's grid.
        predicted_s: predicted iteration time of each job.
        score: compatibility score of the most contended link.
        start_ns: time from which they count.
    """

    shifts_s: tuple[float, ...]
    periods_s: tuple[float, ...]
    predicted_s: tuple[float, ...]
    score: float
    start_ns: int = 0

    def facts(self, number: int, *, is_held: bool) -> dict[str, float]:
        """Return what shared.jsonl has of a job that was kept, or held until its rule began."""
        if is_held:
            return {"begin_shift_s": self.shifts_s[number]}
        kept = {"shift_s": self.shifts_s, "period_s": self.periods_s, "predicted_s": self.predicted_s}
        return {name: values[number] for name, values in kept.items()}

    def until_begun_s(self, now_ns: int) -> float:
        """Return the time until all jobs have just begun an iteration."""
        late_s = ((now_ns - self.start_ns) / 1e9 - max(self.shifts_s)) % self.periods_s[0]
        return (_BEGUN * self.periods_s[0] - late_s) % self.periods_s[0]

    def by_host(self, number: int, clocks: Mapping[str, ClockOffset], until: Path | None) -> dict[str, dict[str, str]]:
        """Return `VARIABLE` for a job on each host, by the host's own clock, until there is a file."""
        begin_ns, period_ns = self.start_ns + round(self.shifts_s[number] * 1e9), round(self.periods_s[number] * 1e9)
        end = f",{until}" if until else ""
        return {host: {VARIABLE: f"{begin_ns + clock.offset_ns},{period_ns}{end}"} for host, clock in clocks.items()}


def pending_steps(plan: SharingPlan, run: Path) -> list[SharingStep]:
    """Return the points that have not been measured yet."""
    done = {point["step"] for point in read_json_lines(run / SHARED_JSONL, SHARED)[0]}
    return [step for step in sharing_steps(plan) if step.number not in done]


class KnownDemand(Condition):
    """Condition of a job alone: its window tells what it sends in an iteration, from which shifts and shares follow.

    Args:
        running: the jobs that run, one once it has been created.
    """

    def __init__(self, running: Sequence[MeasuredJob]) -> None:
        self._running = running

    def examine(self, record: dict[str, Any]) -> None:
        """Let the window be measured again if it does not tell."""
        record["cut"] += filter(None, (unknown_demand(job.run.path, record) for job in self._running))

    @staticmethod
    def is_known(ends_ns: Sequence[int]) -> bool:
        """Return True if a window has as many iterations as are needed."""
        from ringtap.workload.demand_of_recorded_job import MIN_ITERATIONS

        return len(ends_ns) > MIN_ITERATIONS


def unknown_demand(run: Path, window: Mapping[str, Any]) -> str:
    """Return why a window of a job alone does not tell what it sends in an iteration; empty if it does."""
    from ringtap.workload.demand_of_recorded_job import recorded_job

    try:
        recorded_job(run, run.name, (window["window_start_ns"], window["window_end_ns"]))
    except UsageError as error:
        return str(error)
    return ""


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
        hosts: the hosts of the testbed or cluster.
        network: their roles and addresses.
        testbed: the testbed; None on a cluster.
        attempt: gives a new folder below series/ by its name.
        say: receives messages.
        tick: receives the present step and the seconds that it has run.
        tolerant: if True, a window with traffic that is not the jobs' is not measured again.
    """

    def __init__(
        self,
        plan: SharingPlan,
        run: RunDirectory,
        hosts: Hosts,
        network: SweepRoles,
        testbed: RunningTestbed | None,
        attempt: Callable[[str], Path],
        say: Callable[[str], None],
        tick: Callable[[str, float], None],
        *,
        tolerant: bool = False,
    ) -> None:
        self._plan, self._run, self._hosts = plan, run, hosts
        self._testbed, self._attempt, self._say, self._tick = testbed, attempt, say, tick
        self._is_tolerant = tolerant
        self._points = run.path / SHARED_JSONL
        self._paths = [0] * len(plan.jobs)
        self._used: list[UsedLink] = []
        # the ports of real switches cannot be read, but those of the hosts at the other end can
        self._ports: list[dict[str, Any]] = [
            nic_counter(host, network.interface[host], direction)
            for host in sharing(plan.jobs)
            for direction in ("rx", "tx")
        ]
        self._network = network
        self._set_ports()

    def measure(self, steps: Sequence[SharingStep]) -> Iterator[dict[str, Any]]:
        """Measure points, and yield each as in shared.jsonl.

        Raises:
            UsageError: an offset is longer than an iteration, or jobs and links form a loop.
            MeasurementError: a job failed, or the jobs did not run at the same time.
        """
        if any(step.offset == CASSINI for step in steps):
            from ringtap.workload.interleaving import affinity_edges

            for step in steps:
                if step.offset == CASSINI:
                    self._prepare(step)
                    affinity_edges(self._links(self._plan.jobs), len(self._plan.jobs))
        points = JsonLinesWriter(self._points)
        try:
            for number, step in enumerate(steps):
                if step.offset != ALONE and (number == 0 or steps[number - 1].offset == ALONE):
                    self._check_shifts(steps[number:])
                self._prepare(step)
                point = self._measure(step, self._grids(step))
                points.append(point)
                yield point
        finally:
            points.close()

    def _set_ports(self) -> None:
        """Make the counters of the shared links those of the bottleneck."""
        mtu = next(map(self._network.mtu, self._ports), self._network.bottleneck["mtu"])
        bottleneck = {"cross": [], "total": self._ports, "mtu": mtu}
        self._network = replace(self._network, bottleneck=bottleneck)

    def _prepare(self, step: SharingStep) -> None:
        """Choose the paths of a point on a testbed, and find the links that its jobs use on them."""
        if self._testbed is None:
            return
        spec, jobs = self._testbed.state.spec, self._plan.jobs
        if step.offset == CRUX:
            alone = self._recorded(jobs)
            self._paths = crux_paths(spec, jobs, alone, self._intensities(alone))
        else:
            self._paths = random_paths(spec, self._plan.seed, len(jobs), step.repeat)
        self._used = used_links(spec, {jobs.index(job): job for job in step.jobs}, self._paths)
        self._ports = [one.counter(spec, jobs) for one in self._used]
        self._set_ports()
        links = {node: [port["nic"] for port in self._ports if port["node"] == node] for node in self._nodes()}
        self._network = replace(self._network, links={node: tuple(dict.fromkeys(nics)) for node, nics in links.items()})

    def _nodes(self) -> list[str]:
        """Return the nodes that count the shared links."""
        return list(dict.fromkeys(port["node"] for port in self._ports))

    def _intensities(self, alone: Sequence[PeriodicJob]) -> list[float]:
        """Return the GPU intensity of each job of the plan on its slowest link of the testbed."""
        from ringtap.agents.sweep.job_shares import gpu_intensities

        assert self._testbed is not None
        spec, jobs = self._testbed.state.spec, self._plan.jobs
        return gpu_intensities(jobs, alone, [flow_capacity_bps(spec, job.workers) for job in jobs])

    def _check_shifts(self, steps: Sequence[SharingStep]) -> None:
        """Refuse shifts that are longer than the iterations measured alone, before any point with shifts."""
        given = [each for each in (*(step.shifts_s for step in steps), self._plan.begin) if isinstance(each, tuple)]
        alone = self._recorded(self._plan.jobs) if given else []
        for shifts_s in given:
            for job, shift_s in zip(alone, shifts_s, strict=True):
                if shift_s * 1e9 >= job.period_ns:
                    raise UsageError(
                        f"offset {format_duration(shift_s)} of {job.name} is not below its iteration time alone, "
                        f"{format_duration(job.period_ns / 1e9)}: give a shift within an iteration"
                    )

    def _grids(self, step: SharingStep) -> Grids | None:
        """Return the grids of a point by the recorded circles of the jobs; None if jobs are neither kept nor held.

        If jobs need more than a link has, their shifts are those on a circle that is longer by this factor.
        """
        given = self._plan.begin if step.is_free else step.shifts_s
        if step.offset == ALONE or (step.is_free and not given):
            return None
        from ringtap.workload.interleaving import (
            MEASURED_ERROR,
            draw_circles,
            schedule,
            score_with,
            slowdown,
            worst_shifts,
        )

        jobs, links = self._recorded(step.jobs), self._links(step.jobs)
        circles = draw_circles(jobs, MEASURED_ERROR)
        if given == WORST:
            shifts_s = tuple(slot * circles.quantum_s for slot in worst_shifts(circles, links))
        elif not isinstance(given, tuple):
            loads = [sum(circles.rates_bps[job].mean() for job in link.jobs) / link.capacity_bps for link in links]
            load = max(loads, default=0.0)
            longer = [replace(job, period_ns=round(job.period_ns * max(load, 1.0))) for job in jobs]
            wider = draw_circles(longer, MEASURED_ERROR)
            shifts_s = tuple(slot * wider.quantum_s for slot in schedule(wider, links).shifts)
        else:
            shifts_s = given
        slots = [round(shift_s / circles.quantum_s) for shift_s in shifts_s]
        scores, factors = [], []
        for link in links:
            own = [slots[job] for job in link.jobs], [circles.rates_bps[job] for job in link.jobs]
            scores.append(score_with(*own, link.capacity_bps))
            of_link = replace(circles, rates_bps=tuple(own[1]))
            factors.append(slowdown(of_link, own[0], link.capacity_bps))
        # no job is faster than alone
        factor = max(factors, default=1.0) / (1 + min(circles.period_errors))
        predicted_s = tuple(len(rates) * circles.quantum_s * factor for rates in circles.rates_bps)
        periods_s = tuple(period_s * (1 + GRID_MARGIN) for period_s in predicted_s)
        return Grids(shifts_s, periods_s, predicted_s, min(scores, default=1.0))

    def _recorded(self, jobs: Sequence[SharingJob]) -> list[PeriodicJob]:
        """Return the communication of jobs as recorded alone."""
        from ringtap.workload.demand_of_recorded_job import recorded_job

        points = read_json_lines(self._points, SHARED)[0]
        alone = {point["jobs"][0]["name"]: point for point in points if point["offset"] == ALONE}
        found = []
        for job in jobs:
            point = alone[job.name]
            window_ns = point["window_start_ns"], point["window_end_ns"]
            found.append(recorded_job(self._run.path / point["jobs"][0]["directory"], job.name, window_ns))
        return found

    def _links(self, jobs: Sequence[SharingJob]) -> list[InterleavedLink]:
        """Return the links that jobs share, with the capacity that a job has if all have as many flows as the most."""
        from ringtap.workload.interleaving import InterleavedLink

        if self._testbed is None:
            found = [
                InterleavedLink(host, float(self._plan.capacity_bps), tuple(map(jobs.index, users)))
                for host, users in sharing(jobs).items()
            ]
        else:
            found = [
                InterleavedLink(" ".join(one.link.place), one.link.rate_bps / max(one.flows.values()), tuple(one.flows))
                for one in self._used
                if len(one.flows) > 1
            ]
        return limiting_links(found)

    def _measure(self, step: SharingStep, grids: Grids | None) -> dict[str, Any]:
        clocks = {} if grids is None else self._clocks(step, grids)
        plan, shares = self._plan, self._shares(step)
        running: list[MeasuredJob] = []
        condition = KnownDemand(running) if step.offset == ALONE else Condition()
        windows = JobWindows(plan, self._hosts, condition, ("steps", "ddp"), tolerant=self._is_tolerant)
        grids = grids and grids._replace(start_ns=windows.clock.now_ns())
        try:
            with ExitStack() as runs:
                running += [self._create(runs, step, number, job) for number, job in enumerate(step.jobs)]
                until = running[0].run.path / _RELEASED if step.is_free else None
                for number, one in enumerate(running):
                    one.variables = {} if grids is None else grids.by_host(number, clocks, until)
                self._tick(f"{step.label}: starting the jobs", 0.0)
                # until all jobs run, they share links equally
                self._share([JobShare(congestion_control=share.congestion_control) for share in shares], step.offset)
                windows.start(running)
                facts = {} if until is None else self._release(windows, step.offset, shares, until, grids)
                for record, is_kept in windows.measure(partial(self._tick, step.label)):
                    window = {name: record[name] for name in _OF_WINDOW}
                    for remark in remarks(step.label, record, is_kept=is_kept):
                        self._say(remark)
                if step.offset == ALONE and (why := unknown_demand(running[0].run.path, window)):
                    advice = "see that nothing else runs there, or raise window.max_time, then resume"
                    raise MeasurementError(f"{step.label}: {why}: {advice}")
        finally:
            cost = self._share([JobShare()] * len(plan.jobs))
        jobs: list[dict[str, Any]] = []
        for number, (job, one) in enumerate(zip(step.jobs, running, strict=True)):
            jobs.append({"name": job.name, "directory": str(one.run.path.relative_to(self._run.path))})
            jobs[-1] |= {} if grids is None else grids.facts(number, is_held=step.is_free)
            if step.offset in RULES:
                jobs[-1]["share"] = shares[number]._asdict()
            if self._testbed and path_count(self._testbed.state.spec) > 1:
                jobs[-1]["path"] = self._paths[plan.jobs.index(job)]
        facts |= {} if grids is None or step.is_free else {"score": grids.score}
        if clocks and not self._network.one_clock:
            facts["clocks"] = {host: offset._asdict() for host, offset in clocks.items()}
        facts |= {"share_changes": cost} if cost else {}
        point = {"step": step.number, "offset": step.offset, **window, **facts, "ports": self._ports, "jobs": jobs}
        if "rule_ns" in facts:
            self._predict(point, running, shares)
        return point

    def _release(
        self, windows: JobWindows, offset: str, shares: Sequence[JobShare], until: Path, grids: Grids | None
    ) -> dict[str, Any]:
        """Release jobs from the grids that hold them, if there are any, and let the rule begin."""
        if grids is not None:
            windows.wait_for_iterations(HELD_ITERATIONS)
            time.sleep(grids.until_begun_s(windows.clock.now_ns()))
        until.touch()
        self._share(shares, offset)
        rule_ns = windows.clock.now_ns()
        self._check_congestion_controls(shares)
        return {"rule_ns": rule_ns}

    def _shares(self, step: SharingStep) -> list[JobShare]:
        """Return the share of each job of the plan at a point."""
        jobs = self._plan.jobs
        if step.offset not in RULES:
            return [JobShare()] * len(jobs)
        from ringtap.agents.sweep.job_shares import shares_of

        alone = self._recorded(jobs)
        if step.offset == MLTCP:  # a link has the bytes of all flows of a job
            flows = [max((one.flows.get(number, 1) for one in self._used), default=1) for number in range(len(jobs))]
            return [
                share._replace(iteration_bytes=count * share.iteration_bytes)
                for share, count in zip(shares_of(MLTCP, jobs, alone, ()), flows, strict=True)
            ]
        return shares_of(step.offset, jobs, alone, self._intensities(alone) if step.offset == CRUX else ())

    def _share(self, shares: Sequence[JobShare], offset: str = "") -> dict[str, float]:
        """Give jobs their paths, and their shares by classes of shared links, if the rule of a point needs these."""
        if self._testbed is None:
            return {}
        has_classes = offset in RULES and offset != CONGESTION_CONTROL
        links = {one.number: sorted(one.flows) for one in self._used if len(one.flows) > 1 and has_classes}
        return self._testbed.share(links, shares, self._paths)

    def _check_congestion_controls(self, shares: Sequence[JobShare]) -> None:
        """Check that the connections of jobs have the congestion control that the rule gives them."""
        if not any(share.congestion_control for share in shares):
            return
        assert self._testbed is not None
        found = self._testbed.congestion_controls()
        for job, share, names in zip(self._plan.jobs, shares, found, strict=True):
            if share.congestion_control and set(names) != {share.congestion_control}:
                raise MeasurementError(
                    f"connections of {job.name} use {', '.join(names) or 'no'} congestion control instead of "
                    f"{share.congestion_control}: does the job choose one itself?"
                )

    def _predict(self, point: dict[str, Any], running: Sequence[MeasuredJob], shares: Sequence[JobShare]) -> None:
        """Add to a free point what the fluid model predicts of it from the begin of its rule on, or why it does not."""
        if not self._network.one_clock:
            point["predicted_why"] = (
                "the hosts have clocks of their own, by which the phases are not known to begin with"
            )
            return
        if point["offset"] == CONGESTION_CONTROL:
            point["predicted_why"] = "the fluid model knows no congestion control"
            return
        from ringtap.agents.sweep.job_shares import mltcp_phases, predicted_begins_s

        rule_ns, alone = point["rule_ns"], self._recorded(self._plan.jobs)
        window_s = [(point[f"window_{side}_ns"] - rule_ns) / 1e9 for side in ("start", "end")]
        before = [[ns for ns in one.steps.iteration_begins_ns() if ns <= rule_ns] for one in running]
        starts_s = [(begins_ns[-1] - rule_ns) / 1e9 for begins_ns in before]
        links = [(link.capacity_bps, link.jobs) for link in self._links(self._plan.jobs)]
        predicted = predicted_begins_s(alone, shares, starts_s, links, window_s[1])
        for number, (job, begins_s) in enumerate(zip(point["jobs"], predicted, strict=True)):
            # the first job's iteration before, too: that of another one may have begun in it
            job["predicted_begin_ns"] = before[number][-1 if number else -2 :]
            job["predicted_begin_ns"] += [rule_ns + round(begin_s * 1e9) for begin_s in begins_s]
            inside = [begin_s for begin_s in begins_s if begin_s >= window_s[0]]
            if len(inside) > 1:
                job["predicted_s"] = (inside[-1] - inside[0]) / (len(inside) - 1)
        if point["offset"] == MLTCP and links:
            phases = mltcp_phases(alone, starts_s, len(predicted[1]))
            if isinstance(phases, str):
                point["predicted_why"] = phases
            else:
                point["jobs"][1]["mltcp_phases"] = phases

    def _create(self, runs: ExitStack, step: SharingStep, number: int, job: SharingJob) -> MeasuredJob:
        """Create the run directory of a job at a point, in which it has a number."""
        path = self._attempt(f"{step.offset}-{job.name}")
        # one reference for all runs of a point, whose times are compared
        facts = self._network.clock() | {"batch": job.model.batch, "bottleneck": self._network.bottleneck}
        run = runs.enter_context(job_run(self._hosts, path, self._plan.seed, **facts))
        steps = StepWatcher(run, {host: ranks_of(self._plan, host) for host in job.workers})
        watch = Watch(path, self._network, self._plan.capacity_bps, 0, has_one_bottleneck=False)
        model, network = replace(job.model, title=job.name), self._network_of(job)
        return MeasuredJob(model, network, run, watch, steps, job.workers, self._recorders(number, job))

    def _network_of(self, job: SharingJob) -> SweepRoles:
        """Return the roles and addresses of a job, which has addresses of its own on a testbed."""
        own = replace(self._network, roles=replace(self._network.roles, workers=job.workers))
        if self._testbed is None:
            return own
        spec, number = self._testbed.state.spec, self._plan.jobs.index(job)
        addresses = {host: spec.job_ip(host, number) for host in job.workers}
        return replace(own, training=addresses, interface=dict.fromkeys(job.workers, spec.job_nic(number)))

    def _recorders(self, number: int, job: SharingJob) -> list[str]:
        """Return the nodes that the run of a job records beside the job's workers.

        The first run of a point has the counters of all shared links, each run the host whose clock is the reference.
        """
        nodes = self._nodes() if number == 0 else []
        if not self._network.one_clock:
            nodes.append(self._network.roles.workers[0])
        return [node for node in dict.fromkeys(nodes) if node not in job.workers]

    def _clocks(self, step: SharingStep, grids: Grids) -> dict[str, ClockOffset]:
        """Measure the offset of each worker's clock, by which its grid begins earlier or later.

        Raises:
            MeasurementError: an offset is not known well enough for the grid's margin.
        """
        workers = list(dict.fromkeys(host for job in step.jobs for host in job.workers))
        found = clock_offsets(self._hosts, self._network, workers, self._attempt(f"{step.offset}-clocks"))
        margin_s = GRID_MARGIN * min(grids.predicted_s)
        host, worst = max(found.items(), key=lambda item: item[1].error_ns)
        if worst.error_ns / 1e9 > _MAX_CLOCK_ERROR * margin_s:
            raise MeasurementError(
                f"the clock of {host} is known to ± {format_duration(worst.error_ns / 1e9)} only, and the grid of the "
                f"jobs leaves {format_duration(margin_s)} per iteration: measure when the links are idle, or plan "
                'offsets = ["free"]'
            )
        return found
