"""Measures one series of a sweep: a training job that runs while cross traffic is stepped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ringtap.agents.hosts import Hosts
from ringtap.agents.sweep.capture_packets_at_loads import PacketCapture
from ringtap.agents.sweep.cross_traffic import STREAMS, CrossTraffic
from ringtap.agents.sweep.detect_disturbances import RECORDED_S, Watch, counted_bps
from ringtap.agents.sweep.host_roles import SweepRoles
from ringtap.agents.sweep.job_bytes_per_link import LinkPayload
from ringtap.agents.sweep.job_launch_commands import ranks_of
from ringtap.agents.sweep.measurement_windows import Condition, JobWindows, MeasuredJob
from ringtap.agents.sweep.step_watcher import StepWatcher
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.ethernet import frame_bytes
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import ACKNOWLEDGED, VARIANTS
from ringtap.core.sweep_plans.sweep_plan import LoadPlan, Window
from ringtap.core.sweep_plans.training_jobs import Model
from ringtap.core.units import format_rate

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


class SeriesMeasurement(Condition):
    """Measurement of one model under one kind of cross traffic.

    Args:
        plan: the sweep.
        model: the training job.
        hosts: the hosts on which processes run.
        network: roles and addresses of the hosts.
        run: its `ringtap.agents.sweep.job_launch_commands.job_run`, with which its processes end.
        cross: the cross traffic.
        tolerant: if True, a window with traffic that is not the sweep's is not measured again.
        is_known: tells from the ends of a window's iterations whether their mean is known well enough; None: the
            plan's minima suffice.
        links: counts the payload of an iteration on each link, where there is no cross traffic; None: it is not
            counted.
    """

    def __init__(
        self,
        plan: LoadPlan,
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
        self.is_known, self._links = is_known, links
        self._plan, self._model = plan, model
        self._hosts, self._network, self._run, self._cross = hosts, network, run, cross
        self._windows = JobWindows(plan, hosts, self, tolerant=tolerant)
        self._watcher = StepWatcher(run, {host: ranks_of(plan, host) for host in network.roles.workers})
        self._step, self._requested_bps, self._name = Step(0, 0.0), 0.0, ""
        self._streams: dict[float, int] = {}  # of the iperf kind, by load
        self._used_streams: dict[str, Any] = {}  # of the present window, as a part of its record

    def start(self) -> None:
        """Start the receiver, the recorders and the job, and wait for the warm-up iterations.

        Raises:
            MeasurementError: a process ended or did not start in time.
        """
        network = self._network
        self._cross.start_receiver()
        self._watch = Watch(self._run.path, network, self._plan.capacity_bps, self._cross.port)
        recorders = [host for host in network.recorded if host not in network.roles.workers]
        observed = network.attachments
        job = MeasuredJob(self._model, network, self._run, self._watch, self._watcher, observed, recorders)
        self._windows.start([job])

    def measure(self, steps: Iterable[Step], tick: Callable[[float], None]) -> Iterator[tuple[dict[str, Any], bool]]:
        """Measure the load steps.

        Args:
            steps: the load steps, in order; each is taken when the one before has been measured.
            tick: called with the elapsed seconds of the present step, for a progress display.

        Yields:
            A record of points.jsonl, and True if it is kept as the least disturbed window of its step.

        Raises:
            MeasurementError: the job, a recorder or the sender ended, or a step gave no window of whole iterations.
        """
        for self._step in steps:
            self._requested_bps = self._step.load * self._plan.capacity_bps
            item = {
                "series": self._model.series(self._cross.kind),
                "model": self._model.name,
                "traffic": self._cross.kind,
                **{name: getattr(self._model, name) for name in VARIANTS},
                "step": self._step.index,
                "requested_bps": round(self._requested_bps),
            }
            for record, is_kept in self._windows.measure(tick):
                yield item | record, is_kept

    @property
    def _is_captured(self) -> bool:
        return self._plan.capture is not None and self._step.load in self._plan.capture.loads

    def begin(self, attempt: int) -> None:
        """Start the cross traffic of the step, or read the counters of the links where there is none."""
        window, self._used_streams = self._plan.window, {}
        self._name = f"{self._step.index:03d}" + (f"-{attempt}" if attempt else "")
        duration_s = window.settle_s + (4 if self._is_captured else 2) * window.max_s
        if self._requested_bps > 0:
            self._start_cross_traffic(duration_s + (40 if self._is_captured else 10))
        elif self._links:
            self._sample_links(self._links)

    def check(self) -> None:
        """Check that the receiver and the sender run."""
        self._cross.check()

    def record(self, record: dict[str, Any], tick: Callable[[float], None]) -> None:
        """Count the payload of iterations without cross traffic, and record the packets of some."""
        if self._links and not self._requested_bps:
            self._sample_links(self._links)
            time.sleep(RECORDED_S)
            ends_ns = self._watcher.ends_mono_ns()
            record |= self._links.per_iteration([(min(ends), max(ends)) for ends in ends_ns])
        if self._is_captured:
            record |= self._capture(tick)

    def end(self) -> None:
        """Stop the sender."""
        self._cross.stop_sender()

    def examine(self, record: dict[str, Any]) -> None:
        """Add other traffic at the bottleneck and what is known of the cross traffic."""
        window_ns = record["window_start_ns"], record["window_end_ns"]
        other_bps, why = self._watch.other_bps(*window_ns)
        record |= {"other_bps": None if other_bps is None else round(other_bps), "other_why": why}
        record |= self._used_streams
        if self._requested_bps and self._cross.kind == "iperf":  # the other kinds vary
            record["cut"] += self._slow_link(*window_ns)
        if self._network.bottleneck["cross"] == ACKNOWLEDGED:  # the analysis reads other counters itself
            record |= self._acknowledged(*window_ns)

    def _slow_link(self, start_ns: int, end_ns: int) -> list[str]:
        """Return a sentence if iperf traffic stayed below its load although the bottleneck had room.

        The check before the sweep has shown that the generator can load it.
        """
        bottleneck = self._network.bottleneck
        asked_bps = frame_bytes(self._requested_bps, 0, bottleneck["mtu"])
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

    def _capture(self, tick: Callable[[float], None]) -> dict[str, Any]:
        """Record packets for the plan's number of iterations under the present load; return its part of the point."""
        plan = self._plan
        assert plan.capture is not None
        wanted = Window(settle_s=0, min_s=0, min_iterations=plan.capture.iterations, max_s=plan.window.max_s)
        capture, span = PacketCapture(plan, self._hosts, self._network, self._run, self._name), (0, 0)
        try:
            try:
                capture.start()
                span = self._windows.window(wanted, tick)[:2]
            finally:
                capture.stop()
            early_ns, why = capture.outcome()
        except MeasurementError as error:  # the point is measured all the same
            return {"packets_why": str(error)}
        span = (span[0], min(span[1], early_ns or span[1]))
        if span[1] <= span[0]:
            return {"packets_why": why}
        return {"packets_start_ns": span[0], "packets_end_ns": span[1], "packets_why": why}

    def _start_cross_traffic(self, duration_s: float) -> None:
        """Start the sender of a load.

        Unless the plan gives the number of streams of the iperf kind, it rises from that of the next lighter load until
        the load is reached, or until more streams bring no more (thesis, section 3.2).
        """
        requested_bps, name = self._requested_bps, self._name
        if self._cross.kind != "iperf":
            self._cross.start_sender(requested_bps, name, duration_s)
            return
        if self._plan.iperf_streams is not None:
            self._cross.start_sender(requested_bps, name, duration_s, self._plan.iperf_streams)
            self._used_streams = {"iperf_streams": self._plan.iperf_streams}
            return
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
        self._used_streams = {"iperf_streams": number}

    def _trial_bps(self) -> float:
        """Return the rate of the cross traffic that was just started, in bit/s, as frames on the wire.

        Raises:
            MeasurementError: it was not counted, or a process ended.
        """
        time.sleep(_TRIAL_SETTLE_S)
        start_ns = self._windows.clock.now_ns()
        time.sleep(max(_TRIAL_S, 3 * self._network.period_s))
        end_ns = self._windows.clock.now_ns()
        time.sleep(RECORDED_S)
        self._windows.check()
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
        return sum(counted_bps(path, counter, self._network.mtu(counter), start_ns, end_ns) for counter in counters)

    def _acknowledged(self, start_ns: int, end_ns: int) -> dict[str, Any]:
        """Return the rate of the cross traffic that its receiver acknowledged, or why it is not known."""
        try:
            rates = self._watch.rates(self._network.roles.cross_from, start_ns, end_ns)
        except UsageError as error:
            return {"cross_bps": None, "cross_why": str(error)}
        return {"cross_bps": round(rates.acknowledged_bps), "cross_why": ""}
