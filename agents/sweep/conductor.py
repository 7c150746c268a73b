"""Runs a whole sweep: sets up the hosts, checks the generators, measures every series, and keeps the results."""

from __future__ import annotations

import difflib
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.agents.hosts import Hosts, TestbedHosts
from ringtap.agents.hosts.ssh import SshHosts
from ringtap.agents.sweep import growing_report, request_next_load
from ringtap.agents.sweep.bottleneck import busiest, link_use
from ringtap.agents.sweep.capture_packets_at_loads import check_capture, describe
from ringtap.agents.sweep.cluster_preflight import (
    ask_hosts,
    cluster_roles,
    local_job_problems,
    needs_iperf3,
    real_libraries,
)
from ringtap.agents.sweep.cross_traffic import CrossTraffic
from ringtap.agents.sweep.growing_report import GrowingReport
from ringtap.agents.sweep.host_connections import LostHostError, losses_named, reached
from ringtap.agents.sweep.host_facts import nearest_folder, space_problem
from ringtap.agents.sweep.host_roles import SweepRoles, counter_of, testbed_roles, through
from ringtap.agents.sweep.job_bytes_per_link import LinkPayload
from ringtap.agents.sweep.job_launch_commands import check_collectives, job_run, on_this_machine
from ringtap.agents.sweep.measure_load_series import SeriesMeasurement, Step
from ringtap.agents.sweep.measure_sharing_jobs import SharedLinks, pending_steps, sharing_line
from ringtap.agents.sweep.measurement_windows import remarks
from ringtap.agents.sweep.predict_from_message_graphs import expected_series, host_names
from ringtap.agents.sweep.request_next_load import LoadChoice
from ringtap.agents.sweep.resume_with_edited_plan import plan_changes
from ringtap.agents.sweep.sweep_estimate import estimate, layout, resolved, room_bytes, series_names, step_s, sweep_s
from ringtap.agents.sweep.sweep_lock import holder, locked, take_leases
from ringtap.agents.sweep.tcp_reachability import check_reachability
from ringtap.agents.sweep.traffic_precheck import check_generator, check_host, look_at_idle_links
from ringtap.agents.testbed.forwarding_capacity import excess
from ringtap.agents.testbed.start_testbed import RunningTestbed, own_name, rate_warnings
from ringtap.core.append_only_logs import JsonLinesWriter, read_json_lines
from ringtap.core.check_api_arguments import check_callback, instance_of, path_of
from ringtap.core.errors import MeasurementError, UsageError, did_you_mean, failure_message
from ringtap.core.installation import require
from ringtap.core.run_directory import ACCESS, RunDirectory, new_name, read_points
from ringtap.core.run_directory_schema import (
    EXPECTED_JSONL,
    POINTS_JSONL,
    REJECTED_JSONL,
    RUN_JSON,
    SERIES,
    SHARED,
    SHARED_JSONL,
    VARIANTS,
)
from ringtap.core.sweep_plans.cluster_hosts import Cluster
from ringtap.core.sweep_plans.sweep_plan import LoadPlan, SharingPlan, SweepPlan, Testbed, load_plan, plan_from_keys
from ringtap.core.sweep_plans.training_jobs import Model
from ringtap.core.terminal_escaping import shell_word
from ringtap.core.training_transports import is_rdma
from ringtap.core.units import counted, format_rate
from ringtap.trafficgen import iperf3


class SweepProgress(NamedTuple):
    """State of a sweep that runs.

    Attributes:
        doing: present step, such as the series that is measured; empty during the set-up.
        done_s: expected duration in seconds of what has been done.
        total_s: expected duration of all in seconds; 0 during the set-up.
        left_s: time in seconds that is left, by the speed so far.
        message: sentence about what has just happened; empty if only time has passed.
        point: the point that has just been measured, as in points.jsonl; None if none was.
    """

    doing: str
    done_s: float
    total_s: float
    left_s: float
    message: str
    point: Mapping[str, Any] | None


class _Reporter:
    """Reports of a sweep to the caller, whose messages also go to the log of the library.

    Args:
        report: receives each report; None: nobody does.

    Attributes:
        page: the report that grows with the sweep; None: there is none.
    """

    def __init__(self, report: Callable[[SweepProgress], None] | None) -> None:
        self._report = report
        self.page: GrowingReport | None = None
        self._doing, self._total_s, self._done_s, self._begin_s = "", 0.0, 0.0, time.monotonic()
        self._reached_s = 0.0  # what is measured again is not taken back

    def begin(self, total_s: float) -> None:
        """Set the expected duration of what is to be measured, in seconds, and its start."""
        self._total_s, self._begin_s = total_s, time.monotonic()

    def tick(self, doing: str, step_s: float) -> None:
        """Report the present step and the seconds that it has run."""
        self._doing = doing
        self._send(min(self._done_s + step_s, self._total_s))

    def done(self, message: str, expected_s: float, point: Mapping[str, Any]) -> None:
        """Report a point, and count its expected duration as done."""
        self._done_s += expected_s
        self._send(self._done_s, message, point)

    def say(self, message: str) -> None:
        """Report a message."""
        self._send(self._done_s, message)

    def _send(self, done_s: float, message: str = "", point: Mapping[str, Any] | None = None) -> None:
        if message:
            logging.getLogger("ringtap").info(message)
        self._reached_s = done_s = max(self._reached_s, done_s)
        spent_s = time.monotonic() - self._begin_s
        left_s = max(0.0, self._total_s - done_s) * (spent_s / done_s if done_s else 1.0)
        if self._report is not None:
            self._report(SweepProgress(self._doing, done_s, self._total_s, left_s, message, point))
        if self.page is not None:
            self.page.poll(point is not None)


PRECHECK_TRIES = 3  # the machine may be busy for a moment
_NOT_ASKED = "not asked for: a sweep records only iteration times and loads"
_ONLY_WITH_PACKETS = "recorded only with packets: iteration times and loads need none"
_NOT_COLLECTED = {
    "packets": "not asked for: the bottleneck is counted at its interfaces",
    "host load": _NOT_ASKED,
    "GPU": _NOT_ASKED,
    "RDMA": _NOT_ASKED,
}
_NOT_ON_A_TESTBED = {
    "sockets": _NOT_ASKED,
    "GPU": "the scale model has none: compute time is slept",
    "RDMA": "the testbed's links carry TCP only",
}


class SweepSetup(NamedTuple):
    """Hosts and roles of a sweep, and the testbed that it has built."""

    hosts: Hosts
    network: SweepRoles
    testbed: RunningTestbed | None = None


class PendingSeries(NamedTuple):
    """Series with the load steps that are still to be measured, as far as they are known."""

    model: Model
    kind: str
    steps: list[Step]

    @property
    def name(self) -> str:
        """Name of the series: model, kind of traffic and transport."""
        return self.model.series(self.kind)


class Conductor:
    """Measurement of plans of sweeps into a run directory.

    Args:
        run: the sweep's run directory.
        setup: the hosts and roles of the plan's cluster; None: build the plan's testbed.
        reporter: receives what happens.
        force: measure even if other traffic uses the links.
        choice: chooses further loads; None: the plan has all.
    """

    def __init__(
        self,
        run: RunDirectory,
        setup: SweepSetup | None,
        reporter: _Reporter,
        *,
        force: bool = False,
        choice: LoadChoice | None = None,
    ) -> None:
        self._run, self._setup, self._reporter, self._force, self._choice = run, setup, reporter, force, choice
        self._points = run.path / POINTS_JSONL

    @contextmanager
    def _ready(self, plan: SweepPlan, topology: str = "") -> Iterator[SweepSetup]:
        """Give the hosts of a plan's cluster, or of its testbed, of a topology, which is built."""
        if self._setup:
            yield self._setup
            return
        spec, roles = layout(plan)
        spec = replace(spec, name=own_name("sw"))
        with RunningTestbed(spec) as testbed:
            links = testbed.state.links
            self._run.info["lab"] = {"spec": spec.to_json(), "links": links}
            least, most = (pick(link["measured_bps"] for link in links) / 1e6 for pick in (min, max))
            of = f" of a {topology}" if topology else ""
            directions = counted(len(links), "link direction")
            self._reporter.say(f"Testbed up: {directions}{of}: {least:.1f} to {most:.1f} Mbit/s")
            for warning in rate_warnings(links):
                self._reporter.say(f"warning: {warning} (is this machine busy?)")
            with closing(TestbedHosts(spec)) as hosts:
                yield SweepSetup(hosts, testbed_roles(spec, roles, shutil.which("iperf3") or ""), testbed)

    def _check_idle_links(self, plan: SweepPlan, setup: SweepSetup) -> None:
        """Check that no other traffic uses the links of a cluster, and keep the result in run.json.

        Raises:
            MeasurementError: other traffic uses the links, and ``force`` is not set.
        """
        if isinstance(plan.topology, Testbed):
            return
        idle = look_at_idle_links(plan, setup.hosts, setup.network, self._attempt("precheck-idle"))
        self._run.info["idle"] = idle
        self._run.save()
        if not idle["words"]:
            return
        text = "; ".join(idle["words"])
        if not self._force:
            raise MeasurementError(
                f"others use the links while the sweep does not yet: {text}: measure when they are idle, or all the "
                "same with --force"
            )
        self._reporter.say(f"warning: others use the links: {text}")

    def _attempt(self, name: str) -> Path:
        """Return a folder below series/ that no earlier attempt has used."""
        paths = (self._run.path / SERIES / f"{name}-{number}" for number in count(1))
        return next(path for path in paths if not path.exists())

    def share_links(self, plan: SharingPlan) -> None:
        """Measure all points of jobs that share links that have not been measured yet.

        Raises:
            MeasurementError: the testbed, a job or a host failed.
        """
        if not (pending := pending_steps(plan, self._run.path)):
            return
        expected_s = step_s(plan)
        self._reporter.begin(expected_s * len(pending))
        with self._ready(plan) as setup, losses_named(setup.hosts):
            self._run.save()
            self._check_idle_links(plan, setup)
            say, tick = self._reporter.say, self._reporter.tick
            sharing = SharedLinks(plan, self._run, *setup, self._attempt, say, tick, tolerant=self._force)
            for point in sharing.measure(pending):
                self._reporter.done(sharing_line(self._run.path, point), expected_s, point)

    def _pending(self, plan: LoadPlan, only: str) -> list[PendingSeries]:
        """Return the series that have points to measure; only the one of a name unless this is empty."""
        done = {(item["series"], item.get("step")) for item in read_points(self._points)[0]}
        found = []
        for model in plan.models:
            for kind in plan.traffic:
                steps = [Step(index, load) for index, load in enumerate(plan.loads)]
                if plan.random_order:
                    variants = " ".join(getattr(model, name) for name in VARIANTS)
                    random.Random(f"{plan.seed} {model.name} {kind} {variants}".rstrip()).shuffle(steps)
                series = PendingSeries(model, kind, steps)
                left = [step for step in steps if (series.name, step.index) not in done]
                if only not in ("", series.name):
                    continue
                # the budget of chosen loads may be spent before all of the first ones are measured
                if left if self._choice is None else self._choice.next_load(series.name)[0] is not None:
                    found.append(series._replace(steps=left))
        return found

    def _next_step(self, plan: LoadPlan, choice: LoadChoice, series: PendingSeries) -> Step | None:
        """Choose the next load of a series, and keep the choice in run.json; None if the series is complete."""
        load, known, stop = choice.next_load(series.name)
        chosen = self._run.info.setdefault("chosen_loads", {})
        chosen[series.name] = {"load": load, "known": known, "stop": stop}
        self._run.save()
        if known:
            full_gbps = plan.capacity_bps * plan.scale / 1e9
            after = stop if load is None else f"next: {load * full_gbps:.1f} Gbit/s"
            self._reporter.say(f"{series.name}: {known}; {after}")
        elif stop:
            self._reporter.say(f"{series.name}: {stop}")
        if load is None:
            return None
        measured = [item["step"] for item in read_points(self._points)[0] if item["series"] == series.name]
        return Step(max(measured, default=-1) + 1, load)

    def _steps(self, plan: LoadPlan, series: PendingSeries) -> Iterator[Step]:
        """Yield the steps of a series; each that is chosen depends on the points before it."""
        if self._choice is None:
            yield from series.steps
            return
        while (step := self._next_step(plan, self._choice, series)) is not None:
            yield step

    def step_loads(self, plan: LoadPlan, only: str) -> None:
        """Measure all points of series, or only those of one by its name, that have not been measured yet.

        Raises:
            MeasurementError: the testbed, a generator, a job or a host failed.
        """
        pending = self._pending(plan, only)
        if not pending:
            return
        expected_s = {(point["series"], point["load"]): point["duration_s"] for point in estimate(plan)}
        if plan.auto is None:
            total_s = sum(expected_s[series.name, step.load] for series in pending for step in series.steps)
        else:
            total_s = sum(sweep_s(plan, series.name) for series in pending)
        self._reporter.begin(total_s)
        for part in plan.parts():
            if on_part := [series for series in pending if series.model in part.models]:
                self._run_series(part, on_part, expected_s)

    def _run_series(
        self, plan: LoadPlan, pending: list[PendingSeries], expected_s: dict[tuple[str, float], float]
    ) -> None:
        """Measure series on one testbed or cluster, which the part of the plan describes."""
        topology = pending[0].model.topology
        with self._ready(plan, topology) as ready, losses_named(ready.hosts):
            setup = self._at_bottleneck(plan, ready, pending[0])
            self._run.info["bottleneck"] = setup.network.bottleneck
            if topology:
                self._run.info.setdefault("bottlenecks", {})[topology] = setup.network.bottleneck
            if plan.capture:
                for warning in check_capture(plan, setup.hosts, setup.network):
                    self._reporter.say(f"warning: {warning}")
                self._run.info["capture"] = describe(setup.network)
            self._run.save()
            self._check_idle_links(plan, setup)
            if plan.heaviest_load > 0:
                for kind in dict.fromkeys(series.kind for series in pending):
                    self._precheck(plan, setup, kind, topology)
            for series in pending:
                self._measure(plan, setup, series, expected_s)

    def _at_bottleneck(self, plan: LoadPlan, setup: SweepSetup, first: PendingSeries) -> SweepSetup:
        """Return the setup with the busiest link of a testbed, unless it is a star, as the bottleneck.

        It is that of run.json, or the one that is found now.
        """
        hosts, network, testbed = setup
        if testbed is None or (spec := testbed.state.spec).topology == "star":
            return setup
        capacity_bps = plan.capacity_bps
        measured = self._run.info.get("bottleneck") or {}
        if topology := first.model.topology:
            measured = (self._run.info.get("bottlenecks") or {}).get(topology) or {}
        known = list(measured.get("total") or ())
        found = [link for link in spec.links if counter_of(link) in known]
        if not found:
            path = self._attempt("bottleneck")
            use = link_use(plan, first.model, first.kind, testbed, hosts, network, path)
            found = [busiest(use, spec, network.roles.cross_from)]
            (host, direction), rate_bps = found[0].place, found[0].rate_bps
            self._reporter.say(f"Bottleneck: {host} {direction}, {use[found[0]]:.0%} of {format_rate(rate_bps)} used")
            if rate_bps > 1.01 * capacity_bps:
                self._reporter.say(
                    f"warning: the bottleneck is faster than the plan's capacity of {format_rate(capacity_bps)}, to "
                    "which loads and fits refer"
                )
        network = through(network, spec, found)
        if not network.bottleneck["carries_all"] and plan.heaviest_load:
            self._reporter.say(
                "warning: some of the cross traffic has another way than the bottleneck, and its measured rate is that "
                "of all of it"
            )
        return setup._replace(network=network)

    def _precheck(self, plan: LoadPlan, setup: SweepSetup, kind: str, topology: str) -> None:
        """Check that a generator alone can load the bottleneck, and keep the result in run.json."""
        for _ in range(PRECHECK_TRIES):
            result = check_generator(plan, kind, setup.hosts, setup.network, self._attempt(f"precheck-{kind}"))
            if result["ok"] and (self._force or not result["others"]):
                break
        result |= {"topology": topology} if topology else {}
        others = [
            item
            for item in self._run.info.get("precheck", [])
            if (item["kind"], item.get("topology") or "") != (kind, topology)
        ]
        self._run.info["precheck"] = [*others, result]
        self._run.save()
        traffic = "; ".join(result["others"])
        beside = f", and beside it {traffic}" if traffic else ""
        on = f" on {topology}" if topology else ""
        self._reporter.say(f"Generator alone, {kind}{on}: {result['share_of_capacity']:.1%} of the bottleneck{beside}")
        if not result["ok"]:
            raise MeasurementError(
                f"{kind} traffic alone reaches {result['share_of_capacity']:.1%} of the bottleneck, "
                f"{result['required_share']:.0%} are needed{beside}: are its hosts busy, or its links?"
            )
        if traffic and not self._force:
            raise MeasurementError(
                f"others use the links: {traffic}: measure when they are idle, or anyway with --force"
            )

    def _expected_s(self, plan: LoadPlan, point: dict[str, Any], expected_s: dict[tuple[str, float], float]) -> float:
        """Return the expected duration of a point, or its measured time if its load was chosen."""
        if plan.auto is None:
            return expected_s[point["series"], plan.loads[point["step"]]]
        window_s: float = (point["window_end_ns"] - point["window_start_ns"]) / 1e9
        return plan.window.settle_s + window_s

    def _measure(
        self, plan: LoadPlan, setup: SweepSetup, pending: PendingSeries, expected_s: dict[tuple[str, float], float]
    ) -> None:
        name, (hosts, network, testbed), progress = pending.name, setup, self._reporter
        links = self._expected(plan, pending, testbed, network) if testbed and pending.model.collective else None
        path = self._attempt(name)
        facts = network.clock() | {"series": name, "batch": pending.model.batch, "bottleneck": network.bottleneck}
        is_known = None if self._choice is None else self._choice.is_known
        with (
            closing(JsonLinesWriter(self._points)) as points,
            closing(JsonLinesWriter(self._run.path / REJECTED_JSONL)) as rejected,
            job_run(hosts, path, plan.seed, **facts) as run,
            losses_named(hosts),
        ):
            progress.tick(f"{name}: starting the job", 0.0)
            cross = CrossTraffic(plan, pending.kind, hosts, network, path)
            series = SeriesMeasurement(
                plan, pending.model, hosts, network, run, cross, tolerant=self._force, is_known=is_known, links=links
            )
            series.start()
            for point, is_kept in series.measure(self._steps(plan, pending), partial(progress.tick, name)):
                record = point | {"directory": str(path.relative_to(self._run.path))}
                (points if is_kept else rejected).append(record)
                if is_kept:
                    progress.done(_line(plan, point), self._expected_s(plan, point, expected_s), point)
                for remark in remarks(name, point, is_kept=is_kept):
                    progress.say(remark)

    def _expected(
        self, plan: LoadPlan, pending: PendingSeries, testbed: RunningTestbed, network: SweepRoles
    ) -> LinkPayload | None:
        """Record the iteration of a series as its message graphs have it; return what counts the same on the links."""
        spec = testbed.state.spec
        found = expected_series(plan, pending.model, spec, network.roles)
        with closing(JsonLinesWriter(self._run.path / EXPECTED_JSONL)) as lines:
            lines.append({"series": pending.name} | found)
        if "links" not in found:
            return None
        bundles = [host_names(spec, bundle) for bundle in spec.network.bundles]
        return LinkPayload(testbed.link_counts, bundles, found["first_message_s"])


def _line(plan: SweepPlan, point: dict[str, Any]) -> str:
    seconds = (point["window_end_ns"] - point["window_start_ns"]) / 1e9
    mean_s = seconds / point["iterations"]
    asked = point["requested_bps"] * plan.scale / 1e9
    measured = f"{counted(point['iterations'], 'iteration'):>14}, mean {mean_s:.4f} s"
    return f"{point['series']:<24} asked {asked:6.2f} Gbit/s (full size): {measured}"


def _open(plan: SweepPlan, path: Path, resume: bool, access: str, say: Callable[[str], None]) -> RunDirectory:
    if not resume or not (path / RUN_JSON).exists():
        return RunDirectory.create(path, "sweep", sys.argv, plan.seed, access=access, plan=resolved(plan))
    run = RunDirectory.open(path)
    if run.info.get("kind") != "sweep":
        raise UsageError(f"{path} is no sweep: name another folder")
    before, now = run.info.get("plan") or {}, resolved(plan)
    points, shared = read_points(path / POINTS_JSONL)[0], read_json_lines(path / SHARED_JSONL, SHARED)[0]
    changes = plan_changes(before, now, points, shared)
    if changes.touching:
        raise UsageError(
            f"{path} has points that were measured with another plan (different: {', '.join(changes.touching)}): "
            "use a new folder"
        )
    if changes.free:
        say(f"The plan has changed in what no measured point depends on: {', '.join(changes.free)}")
        change = {"t_ns": time.time_ns(), "keys": changes.free}
        run.info["plan_changes"] = [*run.info.get("plan_changes", []), change]
    run.info |= {"status": "running", "why": "", "plan": now}
    run.save()
    return run


def count_points(path: Path) -> int:
    """Count the points that a sweep has measured."""
    return len(read_points(path / POINTS_JSONL)[0]) + len(read_json_lines(path / SHARED_JSONL, SHARED)[0])


@contextmanager
def _kept(run: RunDirectory, say: Callable[[str], None]) -> Iterator[None]:
    """Record in run.json how the measurement within the block ends."""
    again = f"ringtap sweep {run.plan_word} -o {shell_word(run.path)} --resume"
    advice = f"Kept what was measured in {run.path}. To resume: {again}"
    try:
        yield
    except KeyboardInterrupt:
        run.finish("partial", "interrupted")
        say(advice)
        raise
    except Exception as error:
        has_points = count_points(run.path) > 0
        why = failure_message(error)
        run.finish("partial" if has_points or isinstance(error, LostHostError) else "failed", why)
        if has_points:
            with suppress(Exception):  # the caller's function may be what failed
                say(advice)
        raise
    run.finish("complete")


def _check_space(plan: SweepPlan, path: Path) -> None:
    """Check that this machine has space for the files of all hosts.

    Raises:
        UsageError: there is too little space.
    """
    count = len(plan.topology.hosts if isinstance(plan.topology, Cluster) else layout(plan)[0].hosts)
    with suppress(OSError):  # an unwritable folder is reported when the run directory is created
        if problem := space_problem(nearest_folder(path.absolute()), count * room_bytes(plan)):
            raise UsageError(f"{problem}: free some, or name another folder with -o")


def _checked_roles(plan: SweepPlan, hosts: Hosts) -> SweepRoles:
    """Return a cluster's roles after checking that its hosts meet the sweep's needs and reach each other.

    Raises:
        UsageError: a host does not meet the needs, or a connection fails.
        MeasurementError: a host does not answer.
    """
    network = cluster_roles(plan, ask_hosts(plan, hosts))
    if problems := check_reachability(network, hosts):
        raise UsageError("; ".join(problems))
    return network


def _check_machine(plan: SweepPlan, force: bool, say: Callable[[str], None]) -> None:
    """Check that this machine can carry a sweep on a testbed and has the software that it needs.

    Raises:
        UsageError: software or a job's file is missing, the testbed is not valid, or it is too fast and ``force`` is
            not set.
    """
    for part in [plan] if isinstance(plan, SharingPlan) else plan.parts():
        spec, roles = layout(part)
        if too_much := excess(spec, len({*roles.workers, *([roles.cross_from] if plan.heaviest_load else [])})):
            if not force:
                raise UsageError(
                    f"{too_much}: take a larger scale or fewer workers, or measure all the same with --force"
                )
            say(f"warning: {too_much}")
    if needs_iperf3(plan):
        iperf3.find_iperf3()
    if any(model.framework == "horovod" for model in plan.every_model) and not find_spec("horovod"):
        raise UsageError(
            f'framework = "horovod" needs Horovod, which {sys.executable} does not have: '
            "build it with python -m ringtap.examples.build_horovod --install"
        )
    require('job = "real"', real_libraries(plan.every_model))
    for model in plan.every_model:
        on_this_machine(model, say)
    if problems := local_job_problems(plan):
        raise UsageError("; ".join(problems))


def _check_software(plan: SweepPlan, *, report: bool) -> None:
    """Check that this interpreter has the packages that the conductor needs for a plan, and for a report.

    Raises:
        UsageError: one is missing, or the plan's workers cannot have its collectives.
    """
    check_collectives(plan)
    if isinstance(plan, SharingPlan):
        require("[[jobs]]", ("numpy",))
    elif plan.auto:
        require('loads = "auto"', request_next_load.PACKAGES)
    if report:
        require("--report (report=True)", growing_report.PACKAGES)


def _not_collected(plan: SweepPlan) -> list[dict[str, str]]:
    """Return what a sweep does not record, and why, for run.json."""
    missing = _NOT_COLLECTED | ({} if isinstance(plan.topology, Cluster) else _NOT_ON_A_TESTBED)
    recorded: set[str] = set()
    if isinstance(plan, LoadPlan) and plan.capture:
        recorded |= {"packets"}
        missing |= {"sockets": _ONLY_WITH_PACKETS} if "sockets" in missing else {}
    recorded |= {"RDMA"} if any(is_rdma(model.transport) for model in plan.every_model) else set()
    return [{"what": what, "why": why} for what, why in missing.items() if what not in recorded]


def check_series(plan: SweepPlan, only: str) -> None:
    """Check that a plan has a series of this name; an empty name is accepted.

    Raises:
        UsageError: the plan has no such series.
    """
    names = series_names(plan)
    if only and only not in names:
        near = difflib.get_close_matches(only, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names) or 'none'}"
        raise UsageError(f"--series {only} is not a series of this plan; {hint}")


def run_sweep(
    plan: SweepPlan | str | os.PathLike[str] | Mapping[str, Any] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    progress: Callable[[SweepProgress], None] | None = None,
    resume: bool = False,
    force: bool = False,
    series: str = "",
    access: str = "private",
    report: bool = False,
    **keys: Any,
) -> Path:
    """Measure a sweep into a run directory, as ``ringtap sweep`` does, and return the directory's path.

    It may run in any thread. It sets no signal handlers: KeyboardInterrupt ends it in the main thread, an exception of
    ``progress`` in any. What was measured is kept, and the testbed and all processes end with the call.

    Args:
        plan: the path of a plan file, or a dict of its tables, in which rates, sizes and times may be numbers of bit/s,
            bytes and seconds; None: the keys are the plan.
        output: the run directory to create or to resume (default: runs/<UTC>-<name>-<hex>).
        progress: called in this thread with a `SweepProgress` for each message and point, and several times a second.
        resume: keep the existing points and measure the missing ones; if there is no run yet, measure all.
        force: measure loads beyond the calibration of the sender's traffic generator, and on links with other traffic.
        series: the only series to measure; empty: all.
        access: access rights of a new run directory: ``private``, ``group`` or ``all``.
        report: write ``report/report.html`` in the run directory anew after each point, and at the end.
        keys: the plan in keyword arguments: the keys of [sweep], such as ``loads`` and ``traffic``, ``models`` as a
            list of names and dicts, and the other tables as dicts, such as ``window={"min_time": 20}``.

    Raises:
        UsageError: the plan is wrong, a program is missing, the folder is in use or cannot be written, it has points of
            another plan, or another sweep measures into it or on the same hosts.
        MeasurementError: the measurement failed; the points measured so far are kept, and the sweep can be resumed.
    """
    if access not in ACCESS:
        raise UsageError(f"access {access!r} is unknown: {did_you_mean(access, ACCESS)}it is {', '.join(ACCESS)}")
    check_callback(progress)
    plan = _plan(plan, keys)
    check_series(plan, instance_of(series, str, "the series"))
    auto = plan.auto if isinstance(plan, LoadPlan) else None
    _check_software(plan, report=instance_of(report, bool, "report"))
    path = path_of(output, "the output") if output is not None else Path("runs") / new_name(plan.name)
    _check_space(plan, path)
    setup, reporter = None, _Reporter(progress)
    say = reporter.say
    with ExitStack() as stack:
        me = holder(path, sweep_s(plan, series))
        resumes = resume and (path / RUN_JSON).exists()
        if resumes:
            stack.enter_context(locked(path, me, say))
        if isinstance(plan.topology, Cluster):
            hosts = stack.enter_context(reached(plan.topology))
            take_leases(hosts, me, say)
            if resume and isinstance(hosts, SshHosts):
                hosts.clean(path)
            setup = SweepSetup(hosts, _checked_roles(plan, hosts))
            if isinstance(plan, LoadPlan) and plan.capture:
                check_capture(plan, hosts, setup.network)  # before there is a run directory
            say(f"{counted(len(hosts.names), 'host')} by {plan.topology.reach}: {', '.join(hosts.names)}")
        else:
            _check_machine(plan, force, say)
        calibration = check_host(plan, force, say, setup.hosts if setup else None)
        run = _open(plan, path, resume, access, say)
        if not resumes:
            stack.enter_context(locked(path, me, say))
        run.info |= {"not_collected": _not_collected(plan), "calibration": calibration, "report": report}
        run.save()
        scale = f"links of {format_rate(plan.capacity_bps)}, 1:{plan.scale:g}"
        say(f"{plan.name}: {scale}, seed {plan.seed}, into {path}")
        if report:
            reporter.page = stack.enter_context(GrowingReport(path, say))
        with _kept(run, say), ExitStack() as asked:
            choice = asked.enter_context(LoadChoice(path, auto.target_mean)) if auto else None
            conductor = Conductor(run, setup, reporter, force=force, choice=choice)
            if isinstance(plan, SharingPlan):
                conductor.share_links(plan)
            else:
                conductor.step_loads(plan, series)
    return path


def _plan(plan: object, keys: Mapping[str, Any]) -> SweepPlan:
    if plan is None:
        if not keys:
            raise UsageError("there is no plan: give the path of a file, a dict, or keys such as loads= and models=")
        return plan_from_keys(keys)
    if keys:
        raise UsageError(f"{', '.join(f'{key}=' for key in keys)} cannot change a whole plan: put it into the plan")
    return plan if isinstance(plan, SweepPlan) else load_plan(plan)  # type: ignore[arg-type]
