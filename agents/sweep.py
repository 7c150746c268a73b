"""The conductor: builds the testbed, checks the generators, runs every series, keeps what was measured."""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ringtap.agents.cross import CrossTraffic
from ringtap.agents.estimate import estimate, layout, resolved
from ringtap.agents.hosts import LabHosts
from ringtap.agents.interrupt import termination_as_interrupt
from ringtap.agents.lab.up import Lab, rate_warnings
from ringtap.agents.precheck import REQUIRED_SHARE, check_generator, check_host
from ringtap.agents.progress import Progress
from ringtap.agents.series import Series, Step, find_frameworks
from ringtap.errors import MeasurementError, RingtapError, UsageError
from ringtap.plan import Model, SweepPlan
from ringtap.records import JsonLinesWriter, read_json_lines
from ringtap.rundir import RunDirectory
from ringtap.trafficgen import iperf3

PRECHECK_TRIES = 3  # a busy moment of the machine is not the generator's
NOT_COLLECTED = [
    {"what": "packets", "why": "not asked for: the bottleneck is counted at its interfaces"},
    {"what": "sockets", "why": "not asked for: a sweep records interfaces and steps"},
    {"what": "host load", "why": "not asked for: a sweep records interfaces and steps"},
    {"what": "GPU", "why": "the scale model has none: compute time is slept"},
    {"what": "RDMA", "why": "the testbed's links carry TCP only"},
]


class Conductor:
    """Runs a sweep plan into a run directory.

    Args:
        plan: what to measure.
        run: the sweep's run directory.
    """

    def __init__(self, plan: SweepPlan, run: RunDirectory) -> None:
        self._plan, self._run = plan, run
        spec, self._roles = layout(plan)
        self._spec = replace(spec, name=f"sw{os.getpid() % 10**8:08d}")
        self._points = run.path / "points.jsonl"

    def _done(self) -> set[tuple[str, int]]:
        """Series and step of every point measured so far."""
        return {(item["series"], item["step"]) for item in read_json_lines(self._points)[0]}

    def _todo(self, model: Model, kind: str) -> list[Step]:
        steps = [Step(index, load) for index, load in enumerate(self._plan.loads)]
        if self._plan.random_order:
            random.Random(f"{self._plan.seed} {model.name} {kind}").shuffle(steps)
        done = self._done()
        return [step for step in steps if (f"{model.name}-{kind}", step.index) not in done]

    def conduct(self) -> None:
        """Measure every point that is not there yet.

        Raises:
            MeasurementError: the testbed, a generator, a job or a host failed.
        """
        expected_s = {(point["series"], point["load"]): point["duration_s"] for point in estimate(self._plan)}
        todo = [(model, kind, self._todo(model, kind)) for model in self._plan.models for kind in self._plan.traffic]
        todo = [(model, kind, steps) for model, kind, steps in todo if steps]
        total_s = sum(expected_s[f"{model.name}-{kind}", step.load] for model, kind, steps in todo for step in steps)
        progress = Progress(total_s)
        try:
            with Lab(self._spec) as lab:
                self._note_lab(lab, progress)
                for kind in self._plan.traffic:
                    self._precheck(kind, progress)
                for model, kind, steps in todo:
                    self._series(model, kind, steps, expected_s, progress)
        finally:
            progress.close()

    def _note_lab(self, lab: Lab, progress: Progress) -> None:
        links = lab.state.links
        self._run.info |= {
            "lab": {"spec": self._spec.to_json(), "links": links},
            "bottleneck": self._roles.bottleneck(),
        }
        self._run.save()
        least, most = (pick(link["measured_bps"] for link in links) / 1e6 for pick in (min, max))
        progress.say(f"Testbed up: {len(links)} link directions give {least:.1f} to {most:.1f} Mbit/s")
        for warning in rate_warnings(links):
            progress.say(f"warning: {warning} (is this machine busy?)")

    def _precheck(self, kind: str, progress: Progress) -> None:
        """See that a generator alone can load the bottleneck; the result is kept in run.json."""
        for _ in range(PRECHECK_TRIES):
            result = check_generator(self._plan, kind, self._spec, self._roles, self._attempt("precheck", kind))
            if result["ok"]:
                break
        self._run.info["precheck"] = [item for item in self._run.info.get("precheck", []) if item["kind"] != kind] + [
            result
        ]
        self._run.save()
        progress.say(f"Generator alone, {kind}: {result['share_of_capacity']:.1%} of the bottleneck")
        if not result["ok"]:
            raise MeasurementError(
                f"{kind} traffic alone reaches {result['share_of_capacity']:.1%} of the bottleneck, "
                f"{REQUIRED_SHARE:.0%} are needed: is this machine busy?"
            )

    def _attempt(self, first: str, second: str) -> Path:
        """A folder below series/ that no earlier attempt has used."""
        number = 1
        while (path := self._run.path / "series" / f"{first}-{second}-{number}").exists():
            number += 1
        return path

    def _series(
        self, model: Model, kind: str, steps: list[Step], expected_s: dict[tuple[str, float], float], progress: Progress
    ) -> None:
        name = f"{model.name}-{kind}"
        path = self._attempt(model.name, kind)
        run = RunDirectory.create(path, "job", sys.argv, self._plan.seed, series=name, one_clock=True)
        hosts = LabHosts(self._spec)
        cross = CrossTraffic(self._plan, kind, hosts, self._roles.cross_from, self._roles.cross_to, path)
        series = Series(self._plan, model, self._roles, hosts, run, cross)
        points, rejected = JsonLinesWriter(self._points), JsonLinesWriter(self._run.path / "rejected.jsonl")
        try:
            progress.tick(f"{name}: starting the job", 0.0)
            series.start()
            for point, keep in series.measure(steps, lambda seconds: progress.tick(name, seconds)):
                (points if keep else rejected).append(point | {"directory": str(path.relative_to(self._run.path))})
                if keep:
                    progress.done(_line(self._plan, point), expected_s[name, self._plan.loads[point["step"]]])
                else:
                    progress.say(f"{name}: measured again, {point['late_share']:.1%} of the samples came late")
            run.info["status"] = "complete"
        except BaseException as error:
            run.info |= {"status": "partial", "why": str(error) or type(error).__name__}
            raise
        finally:
            points.close()
            rejected.close()
            series.stop()
            run.save()


def _line(plan: SweepPlan, point: dict[str, Any]) -> str:
    seconds = (point["window_end_ns"] - point["window_start_ns"]) / 1e9
    mean_s = seconds / point["iterations"]
    asked = point["requested_bps"] * plan.scale / 1e9
    measured = f"{point['iterations']:4d} iterations, mean {mean_s:.4f} s"
    return f"{point['series']:<24} asked {asked:6.2f} Gbit/s (full size): {measured}"


def _open(plan: SweepPlan, path: Path, resume: bool) -> RunDirectory:
    if not resume:
        return RunDirectory.create(path, "sweep", sys.argv, plan.seed, plan=resolved(plan))
    run = RunDirectory.open(path)
    before, now = run.info.get("plan") or {}, resolved(plan)
    differing = [key for key in now if now[key] != before.get(key)]
    if differing:
        raise UsageError(f"{path} was measured with another plan (different: {', '.join(differing)}): use a new folder")
    run.info |= {"status": "running", "why": ""}
    run.save()
    return run


def run_sweep(plan: SweepPlan, path: Path, resume: bool = False, force: bool = False) -> dict[str, Any]:
    """Measure a sweep into a run directory.

    Args:
        plan: what to measure.
        path: the run directory to make, or to go on with.
        resume: keep the points that are there and measure the rest.
        force: measure loads beyond what this host's traffic generator is calibrated for.

    Returns:
        ``{path, status, points, duration_s}``.

    Raises:
        UsageError: a tool is missing, the folder is in use or cannot be written, another plan was measured there.
        MeasurementError: the measurement failed; what was measured is kept, and can be resumed.
    """
    layout(plan)
    if "iperf" in plan.traffic:
        iperf3.find_iperf3()
    find_frameworks(plan.models)
    calibration = check_host(plan, force, lambda words: print(words, file=sys.stderr, flush=True))
    run = _open(plan, path, resume)
    run.info |= {"not_collected": NOT_COLLECTED, "calibration": calibration}
    begin_s = time.monotonic()
    settings = (
        f"plan={plan.name} seed={plan.seed} scale=1:{plan.scale:g} capacity_bps={plan.capacity_bps} output={path}"
    )
    print(settings, file=sys.stderr)
    try:
        with termination_as_interrupt():
            Conductor(plan, run).conduct()
    except KeyboardInterrupt:
        run.finish("partial", "interrupted")
        print(f"Kept what was measured in {path}; go on with: ringtap sweep … -o {path} --resume", file=sys.stderr)
        raise
    except RingtapError as error:
        count = len(read_json_lines(path / "points.jsonl")[0])
        run.finish("partial" if count else "failed", str(error))
        raise
    run.finish("complete")
    count = len(read_json_lines(path / "points.jsonl")[0])
    return {
        "path": str(path),
        "status": "complete",
        "points": count,
        "duration_s": round(time.monotonic() - begin_s, 1),
    }
