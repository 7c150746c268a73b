"""Implements ``ringtap schedule``: finds time shifts with which jobs share links, and their compatibility score."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringtap.core.command_options import add_force, add_json, print_result
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import RUN_JSON
from ringtap.core.terminal_escaping import text_table
from ringtap.core.units import counted, format_rate, parse_duration_s, parse_rate_bps, whole_number
from ringtap.core.untrusted_files import refuse_existing
from ringtap.workload.command_options import add_algorithms, add_ranks_per_host, algorithms, ranks_per_host

if TYPE_CHECKING:
    from ringtap.workload.fluid_sharing_model import Share
    from ringtap.workload.interleaving import Circles, InterleavedLink, PeriodicJob, Schedule

MAX_JOBS, MAX_LINKS = 6, 16
MAX_PHASES = 1000
MAX_ITERATIONS = 1000
MAX_PERIOD_S, MAX_RATE_BPS = 3600.0, 10**15
_NAME = 40  # characters of a name in a table


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``schedule``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "workloads", nargs="*", type=Path, metavar="W",
        help="directories of execution traces, or runs of jobs that ran alone",
    )  # fmt: skip
    parser.add_argument(
        "--job", dest="jobs", action="append", default=[], metavar="PERIOD:START-END@RATE,...",
        help="time of an iteration, and phases in which it communicates, such as 100ms:0ms-60ms@50gbit",
    )  # fmt: skip
    parser.add_argument("--capacity", metavar="RATE", help="capacity of the link that all jobs share")
    parser.add_argument(
        "--link", dest="shared", action="append", default=[], metavar="NAME=RATE:JOB,...",
        help="a link with its capacity and the numbers of its jobs, which begin at 0; may be repeated",
    )  # fmt: skip
    parser.add_argument("--links", metavar="N", help="place the jobs on N links of --capacity")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the circles into a .png, .svg or .pdf file")
    parser.add_argument(
        "--sharing", metavar="RULE",
        help="also run the jobs by a rule that divides the link: fair, mltcp, weights=2,1, priorities=1,0 or crux",
    )  # fmt: skip
    parser.add_argument("--flop", metavar="N,...", help="FLOPs of an iteration of each job, for --sharing crux")
    parser.add_argument("--levels", metavar="N", help="levels of priority that the network has (default: one per job)")
    parser.add_argument("--start", metavar="TIME,...", help="begin of each job's first iteration under --sharing")
    parser.add_argument("--iterations", metavar="N", default="200", help="iterations under --sharing (default: 200)")
    add_algorithms(parser)
    add_ranks_per_host(parser)
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_schedule)


def read_job(text: str) -> PeriodicJob:
    """Return the job of PERIOD:START-END@RATE,START-END@RATE and so on.

    Raises:
        UsageError: it is not understood, or phases overlap or are outside the period.
    """
    from ringtap.workload.interleaving import PeriodicJob, Phase

    period, _, rest = text.partition(":")
    period_ns = _nanoseconds(period, "--job")
    if not period_ns:
        raise UsageError(f"--job {text}: the period is 0, give the time of an iteration")
    phases: list[Phase] = []
    for part in rest.split(","):
        times, _, rate = part.partition("@")
        begin, _, end = times.partition("-")
        if not (begin and end and rate):
            raise UsageError(f"--job {text}: {part!r} is not START-END@RATE, such as 0ms-60ms@50gbit")
        begin_ns, end_ns = (_nanoseconds(time, "--job") for time in (begin, end))
        if not (phases[-1].end_ns if phases else 0) <= begin_ns < end_ns <= period_ns:
            raise UsageError(
                f"--job {text}: the phase {part} is not within the period and after the phase before: give phases in "
                "order, and a phase that goes over the period's end as two"
            )
        phases.append(Phase(begin_ns, end_ns, _rate_bps(rate, "--job")))
    if len(phases) > MAX_PHASES:
        raise UsageError(f"a job has {len(phases):,} phases, more than {MAX_PHASES:,}: join those with small gaps")
    return PeriodicJob(text, period_ns, tuple(phases))


def _nanoseconds(text: str, option: str) -> int:
    seconds = parse_duration_s(text, option)
    if seconds > MAX_PERIOD_S:
        raise UsageError(f"{text} is longer than {MAX_PERIOD_S:,.0f} s, the longest time of an iteration")
    return round(seconds * 1e9)


def _rate_bps(text: str, option: str) -> float:
    rate_bps = parse_rate_bps(text, option)
    if not 0 < rate_bps <= MAX_RATE_BPS:
        raise UsageError(f"a rate of {text} is not above 0 and at most {format_rate(MAX_RATE_BPS)}")
    return rate_bps


def read_link(text: str, jobs: int) -> InterleavedLink:
    """Return the link of NAME=RATE:JOB,JOB and so on.

    Raises:
        UsageError: it is not understood, or names a job that does not exist.
    """
    from ringtap.workload.interleaving import InterleavedLink

    name, _, rest = text.partition("=")
    capacity, _, numbers = rest.partition(":")
    if not (name and capacity and numbers):
        raise UsageError(f"--link {text!r} is not NAME=RATE:JOB,..., such as up=25gbit:0,1")
    found = sorted(whole_number(number, f"--link {name}: job") for number in numbers.split(","))
    unknown = next((number for number in found if not 0 <= number < jobs), None)
    if unknown is not None:
        raise UsageError(f"--link {name} has job {unknown}, but there are jobs 0 to {jobs - 1}")
    if len(set(found)) < len(found):
        raise UsageError(f"--link {name} names a job twice")
    return InterleavedLink(name, _rate_bps(capacity, f"--link {name}"), tuple(found))


def _links(options: argparse.Namespace, jobs: int) -> list[InterleavedLink]:
    """Return the links of the command line; with --links, the one whose capacity they have."""
    from ringtap.workload.interleaving import InterleavedLink

    if options.capacity is not None and options.shared:
        raise UsageError("--capacity is for one link of all jobs, --link for links of some: give one of them")
    if options.capacity is not None:
        return [InterleavedLink("link", _rate_bps(options.capacity, "--capacity"), tuple(range(jobs)))]
    if options.links is not None or not options.shared:
        raise UsageError("the capacity of the link is missing: add --capacity 25gbit")
    links = [read_link(text, jobs) for text in options.shared]
    names = [link.name for link in links]
    if len(links) > MAX_LINKS or len(set(names)) < len(names):
        raise UsageError(
            f"--link is given for {len(links)} links: at most {MAX_LINKS} with different names are possible"
        )
    absent = set(range(jobs)) - {job for link in links for job in link.jobs}
    if absent:
        raise UsageError(f"job {min(absent)} is on no link: name it in a --link or leave it out")
    return links


def _jobs(options: argparse.Namespace, links: list[InterleavedLink]) -> list[PeriodicJob]:
    """Return the jobs: those of workloads, simulated at the lowest capacity of their links, or recorded, come first."""
    found = []
    if options.workloads:
        from ringtap.workload.demand_of_recorded_job import recorded_job
        from ringtap.workload.interleaving import simulated_job
        from ringtap.workload.workload import read_workload

        chosen = algorithms(options)
        for number, path in enumerate(options.workloads):
            if (path / RUN_JSON).is_file():
                found.append(recorded_job(path, str(path)))
                continue
            workload, rate_bps = read_workload(path), min(link.capacity_bps for link in links if number in link.jobs)
            per_host = ranks_per_host(options, workload)
            found.append(simulated_job(workload, str(path), chosen, rate_bps, per_host))
    return found + [read_job(text) for text in options.jobs]


def read_shares(text: str, jobs: int) -> list[Share]:
    """Return the claim of each job by a rule: fair, mltcp, weights=W,… or priorities=P,….

    Raises:
        UsageError: the rule is not understood, or has not one number per job.
    """
    from ringtap.workload.fluid_sharing_model import MLTCP, Share

    rule, _, rest = text.partition("=")
    if text in ("fair", "mltcp"):
        return [Share() if text == "fair" else MLTCP] * jobs
    if rule not in ("weights", "priorities"):
        raise UsageError(f"--sharing {text!r} is not fair, mltcp, weights=2,1, priorities=1,0 or crux")
    numbers = [whole_number(number, f"--sharing {rule}") for number in rest.split(",")]
    if len(numbers) != jobs or (rule == "weights" and min(numbers) < 1):
        raise UsageError(f"--sharing {text} needs {rule} of {counted(jobs, 'job')}, weights of at least 1")
    return [Share(number) if rule == "weights" else Share(priority=number) for number in numbers]


class _Sharing(NamedTuple):
    """Run of jobs without a schedule; for the rule ``crux``, their FLOPs are given instead of shares."""

    rule: str
    shares: list[Share]
    flop: list[float]
    levels: int
    starts_s: list[float]
    iterations: int


def _sharing(options: argparse.Namespace, jobs: int) -> _Sharing | None:
    """Return the run of jobs without a schedule that the command line asks for, if it does."""
    is_crux = options.sharing == "crux"
    if options.sharing is None:
        if any(getattr(options, name) is not None for name in ("start", "flop", "levels")):
            raise UsageError("--start, --flop and --levels are for --sharing: add a rule, such as --sharing fair")
        return None
    if options.capacity is None or (options.links is not None and not is_crux):
        raise UsageError("--sharing is for one link of all jobs, and crux for --links: give --capacity, and no --link")
    if is_crux != (options.flop is not None) or (options.levels is not None and not is_crux):
        raise UsageError("--sharing crux needs the --flop of each job, and no other rule has --flop or --levels")
    iterations = whole_number(options.iterations, "--iterations", 1, MAX_ITERATIONS)
    starts_s = (
        [_nanoseconds(text, "--start") / 1e9 for text in options.start.split(",")] if options.start else [0.0] * jobs
    )
    if len(starts_s) != jobs:
        raise UsageError(f"--start {options.start} has {len(starts_s)} times, and there are {counted(jobs, 'job')}")
    try:
        flop = [float(text) for text in options.flop.split(",")] if is_crux else []
    except ValueError:
        flop = [math.nan]
    if is_crux and (len(flop) != jobs or not all(0 < each < math.inf for each in flop)):
        raise UsageError(f"--flop {options.flop} is not a number above 0 for each of {counted(jobs, 'job')}")
    levels = jobs if options.levels is None else whole_number(options.levels, "--levels", 1, MAX_JOBS)
    shares = [] if is_crux else read_shares(options.sharing, jobs)
    return _Sharing(options.sharing, shares, flop, levels, starts_s, iterations)


def _run_shared(
    jobs: list[PeriodicJob], sharing: _Sharing, shifts_ms: list[float], capacity_bps: float, places: int
) -> dict[str, Any]:
    """Return the iterations of jobs without a schedule, from their own starts and, on one link, from the shifts."""
    from ringtap.workload.crux_scheduling import (
        choose_paths,
        gpu_intensity_flop_per_s,
        priority_levels,
        random_paths_flop_per_s,
    )
    from ringtap.workload.fluid_sharing_model import Share, share_link, share_paths

    iterations, shares, paths = sharing.iterations, sharing.shares, [0] * len(jobs)
    item: dict[str, Any] = {"rule": sharing.rule, "iterations": iterations}
    if sharing.flop:
        pairs = zip(sharing.flop, jobs, strict=True)
        intensities = [gpu_intensity_flop_per_s(flop, job, capacity_bps) for flop, job in pairs]
        levels = priority_levels(intensities, sharing.levels)
        shares = [Share(priority=level) for level in levels]
        paths = choose_paths(intensities, jobs, places)
        item |= {"gpu_intensity_flop_per_s": intensities, "priorities": levels, "paths": paths}

    def runs(starts_s: list[float]) -> list[dict[str, Any]]:
        found = share_paths(jobs, paths, shares, starts_s, capacity_bps, iterations)
        return [
            {
                "first_ms": 1e3 * float(run.iteration_s[0]), "mean_ms": 1e3 * float(run.iteration_s.mean()),
                "last_ms": 1e3 * float(run.iteration_s[-1]),
                "begin_ms": [round(begin, 6) for begin in (1e3 * run.begin_s).tolist()],
            }
            for run in found
        ]  # fmt: skip

    alone = [share_link([job], [Share()], [0.0], capacity_bps, 1)[0] for job in jobs]
    item |= {
        "starts_ms": [1e3 * start for start in sharing.starts_s],
        "alone_ms": [1e3 * float(run.iteration_s[0]) for run in alone],
        "unshifted": runs(sharing.starts_s),
    }
    if sharing.flop:
        means_ms = [each["mean_ms"] for each in item["unshifted"]]
        item["crux_flop_per_s"] = sum(1e3 * flop / ms for flop, ms in zip(sharing.flop, means_ms, strict=True))
        item["fair_flop_per_s"] = random_paths_flop_per_s(
            jobs, sharing.flop, sharing.starts_s, capacity_bps, iterations, places
        )
    if places == 1:
        item["shifted"] = runs([shift / 1e3 for shift in shifts_ms])
    return item


def _schedule(options: argparse.Namespace) -> int:
    return print_result(options, *result(options))


def result(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return what ``--json`` prints, and the lines that are printed without it.

    Raises:
        UsageError: the options are wrong, or an input cannot be read.
    """
    from ringtap.workload.interleaving import MEASURED_ERROR, draw_circles, place, schedule

    count = len(options.workloads) + len(options.jobs)
    if not 2 <= count <= MAX_JOBS:
        raise UsageError(
            f"{counted(count, 'job')} given: give 2 to {MAX_JOBS}, as --job or as directories of workloads"
        )
    refuse_existing(options.figure, options.force)
    places = None if options.links is None else whole_number(options.links, "--links", 1, MAX_JOBS)
    links = _links(options, count)
    sharing = _sharing(options, count)
    jobs = _jobs(options, links)
    is_measured = any((path / RUN_JSON).is_file() for path in options.workloads)
    circles = draw_circles(jobs, MEASURED_ERROR if is_measured else 0.0)
    found = schedule(circles, links) if places is None else place(circles, links[0].capacity_bps, places)
    if options.figure is not None:
        from ringtap.workload.circles_plot import write_circles

        write_circles(circles, found, [f"job {number}" for number in range(count)], options.figure)
    item = _item(jobs, circles, found)
    if sharing:
        item["sharing"] = _run_shared(jobs, sharing, item["shifts_ms"], links[0].capacity_bps, places or 1)
    return item, _lines(item)


def _item(jobs: list[PeriodicJob], circles: Circles, found: Schedule) -> dict[str, Any]:
    quantum_ms = 1e3 * circles.quantum_s
    return {
        "score_unshifted": found.score_unshifted, "score": found.score,
        "shifts_ms": [round(shift * quantum_ms, 6) for shift in found.shifts],
        "perimeter_ms": round(circles.slots * quantum_ms, 6), "slots": circles.slots, "quantum_ms": quantum_ms,
        "jobs": [
            {
                "name": job.name, "period_ms": job.period_ns / 1e6, "period_error": error,
                "phases": [
                    {"begin_ms": phase.begin_ns / 1e6, "end_ms": phase.end_ns / 1e6, "rate_bps": phase.rate_bps}
                    for phase in job.phases
                ],
            }
            for job, error in zip(jobs, circles.period_errors, strict=True)
        ],
        "links": [
            {
                "name": link.name, "capacity_bps": link.capacity_bps, "jobs": list(link.jobs),
                "score_unshifted": scores.score_unshifted, "score": scores.score,
                "shifts_ms": [round(shift * quantum_ms, 6) for shift in scores.shifts],
                "search": scores.search, "optimal": scores.optimal,
            }
            for link, scores in zip(found.links, found.interleavings, strict=True)
        ],
    }  # fmt: skip


def _lines(item: dict[str, Any]) -> list[str]:
    full = all(link["score"] > 1 - 1e-9 for link in item["links"])
    shifts = ", ".join(f"{shift:g}" for shift in item["shifts_ms"])
    worst = max(abs(job["period_error"]) for job in item["jobs"])
    found = f"score {item['score']:.4g} with shifts of {shifts} ms, {item['score_unshifted']:.4g} without"
    lines = [
        f"{'Fully' if full else 'Partially'} compatible: {found}",
        f"Circle of {item['perimeter_ms']:g} ms in {counted(item['slots'], 'slot')} of {item['quantum_ms']:.4g} ms; "
        + (f"periods are off by up to {worst:.2%}" if worst else "periods are exact"),
    ]
    rows = [["job", "name", "period, ms", "shift, ms", "sending phases", "highest rate"]]
    for number, (job, shift) in enumerate(zip(item["jobs"], item["shifts_ms"], strict=True)):
        highest = format_rate(max(phase["rate_bps"] for phase in job["phases"]))
        name = job["name"] if len(job["name"]) <= _NAME else f"{job['name'][: _NAME - 1]}…"
        rows.append([str(number), name, f"{job['period_ms']:.6g}", f"{shift:g}", str(len(job["phases"])), highest])
    lines += [
        *text_table(rows, left=2),
        "Scores of links: 1 if jobs never need more than the capacity, less by the share of it that they need beyond",
    ]
    rows = [["link", "search", "capacity", "jobs", "without shifts", "with shifts"]]
    for link in item["links"]:
        numbers = " ".join(map(str, link["jobs"])) or "none"
        scores = [f"{link['score_unshifted']:.4g}", f"{link['score']:.4g}"]
        rows.append([link["name"], link["search"], format_rate(link["capacity_bps"]), numbers, *scores])
    lines += text_table(rows, left=2)
    if sharing := item.get("sharing"):
        starts = ", ".join(f"{start:g}" for start in sharing["starts_ms"])
        several = len(item["links"]) > 1
        lines.append(
            f"Iterations if {'links are' if several else 'the link is'} shared by {sharing['rule']}, from starts of "
            f"{starts} ms" + ("" if several else " and from the shifts")
        )
        if "priorities" in sharing:
            before, after = sharing["fair_flop_per_s"], sharing["crux_flop_per_s"]
            random = " of random links" if several else ""
            lines.append(
                f"All jobs compute {after:.4g} FLOP/s, {after / before - 1:+.1%} compared with fair shares{random}"
            )
            for number, level in enumerate(sharing["priorities"]):
                intensity, link = sharing["gpu_intensity_flop_per_s"][number], sharing["paths"][number]
                on = f", link {link}" if several else ""
                lines.append(f"  job {number}: GPU intensity {intensity:.4g} FLOP/s, priority {level}{on}")
        rows = [["job", "alone, ms", "first, ms", "last, ms", f"mean of {sharing['iterations']}"]]
        rows[0] += [] if several else ["mean from shifts, ms"]
        for number, alone_ms in enumerate(sharing["alone_ms"]):
            free = sharing["unshifted"][number]
            times = [alone_ms, free["first_ms"], free["last_ms"], free["mean_ms"]]
            times += [] if several else [sharing["shifted"][number]["mean_ms"]]
            rows.append([str(number), *(f"{each:.5g}" for each in times)])
        lines += text_table(rows)
    return lines
