"""Measures what a job sends in an iteration, which CASSINI calls its profile, by counters of a recorded run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringtap.core.append_only_logs import RecordFile
from ringtap.core.counter_growth import longest_gap_ns
from ringtap.core.counter_log_reader import CounterLog
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.ethernet import frame_bytes
from ringtap.core.iteration_end_detector import IterationEnds
from ringtap.core.run_directory import RunDirectory, clock_gap_ns, open_log
from ringtap.core.run_directory_schema import MARK_RECORD, NIC_REC
from ringtap.workload.interleaving import PeriodicJob, Phase
from ringtap.workload.message_graph import Integers
from ringtap.workload.simulation import Numbers

BINS = 100  # of an iteration
MIN_ITERATIONS = 10  # from which a profile is made
WARM_UP_ITERATIONS = 5  # that do not count, if no window is given
_MAX_ITERATIONS, _MAX_SAMPLES = 10_000, 1_000_000  # the last ones
_SILENT_SHARE = 0.02  # of the highest rate, below which a job does not communicate
_LOOPBACK = "lo"


def recorded_job(path: Path, name: str, window_ns: tuple[int, int] | None = None) -> PeriodicJob:
    """Return the communication of a recorded job, which ran alone, at the host of its rank 0.

    The period is the median iteration time. The rate in each of the `BINS` of a period is the mean over the iterations
    of what the busiest interface counted in its busier direction, as frames on the wire; all together are the bytes of
    a mean iteration.

    Args:
        path: the job's run directory.
        name: name of the job.
        window_ns: begin and end of the time that counts, as the sweep timed it: by the host's own clock, as all times
            here, or by that of another of the job's hosts; None: all but the first iterations.

    Raises:
        UsageError: the run has too few iterations, or no interface counters.
    """
    RunDirectory.open(path)  # refuses what is none
    logs = [one for one in sorted(path.glob("nodes/*/steps/rank0-*.rec")) if one.suffixes == [".rec"]]
    if not logs:
        raise UsageError(f"{path} has no steps of rank 0: record the job with ringtap run, or in a sweep")
    found: dict[Path, Numbers] = {}
    for log in logs:
        with file_errors(log):
            steps_log = open_log(log)
        found[log] = _begins(steps_log, clock_gap_ns(log.parents[1]) or 0)
    steps = max(logs, key=lambda log: _span_ns(found[log]))
    begins_ns = found[steps]
    if window_ns is None:
        begins_ns = begins_ns[WARM_UP_ITERATIONS:]
    else:
        begins_ns = begins_ns[(begins_ns >= window_ns[0]) & (begins_ns <= window_ns[1])]
    if len(begins_ns) <= MIN_ITERATIONS:
        raise UsageError(f"{path} has {max(len(begins_ns) - 1, 0)} iterations that count: {MIN_ITERATIONS} are needed")
    period_ns = float(np.median(np.diff(begins_ns)))
    t_ns, steps_bytes = _counted(steps.parent.parent / NIC_REC, int(begins_ns[0]), int(begins_ns[-1]))
    begins_ns, next_ns = begins_ns[:-1], begins_ns[1:]
    known = _known(t_ns, steps_bytes, begins_ns, np.maximum(next_ns, begins_ns + period_ns), period_ns)
    if len(known) < MIN_ITERATIONS:
        raise UsageError(
            f"{path}: the interface counters cover {len(known)} iterations without a reset or a gap, {MIN_ITERATIONS} "
            "needed"
        )
    begins_ns, next_ns = begins_ns[known], next_ns[known]
    size_bytes = np.append(0.0, np.cumsum(np.nan_to_num(steps_bytes)))
    edges_ns = np.linspace(0, period_ns, BINS + 1)
    grown = np.diff(np.interp(begins_ns[:, None] + edges_ns, t_ns, size_bytes), axis=1)
    rates_bps = grown.mean(axis=0) * 8e9 * BINS / period_ns
    # what iterations that are longer than the median send after its end counts, too
    through = np.interp(next_ns, t_ns, size_bytes) - np.interp(begins_ns, t_ns, size_bytes)
    rates_bps *= through.mean() / max(grown.sum(axis=1).mean(), 1.0)
    speaks = np.flatnonzero(rates_bps > _SILENT_SHARE * rates_bps.max())
    if not len(speaks):
        raise UsageError(f"{path}: rank 0's host sends nothing: the job may share any link, leave it out")
    whole_ns = [round(edge) for edge in edges_ns]
    phases = (Phase(whole_ns[slot], whole_ns[slot + 1], float(rates_bps[slot])) for slot in speaks)
    return PeriodicJob(name, whole_ns[-1], tuple(phases))


def _begins(steps: RecordFile, gap_ns: int) -> Numbers:
    """Return the begins of the last iterations: the ends of steps that end one, or of the pauses after them.

    The times are those by CLOCK_MONOTONIC plus ``gap_ns``.

    If other optimizers take over meanwhile, they are the begins of the longest stretch.
    """
    place = steps.index
    pause, kind = place.get("pause_ns"), place.get("kind")
    ends, stretches = IterationEnds[int](), [list[int]()]
    known = ends.stretch
    for row in steps.tail(max(0, steps.count - _MAX_ITERATIONS)):
        end_ns = int(row[place["end_mono_ns"]] + gap_ns + (0 if pause is None else row[pause]))
        ended_ns = ends.add(end_ns, row[place["optimizer"]], kind is not None and row[kind] == MARK_RECORD)
        if ends.stretch != known:
            known = ends.stretch
            if ends.is_reread:
                stretches.pop()
            stretches.append([])
        if ended_ns is not None:
            stretches[-1].append(ended_ns)
    return max((np.sort(np.array(one, np.float64)) for one in stretches), key=_span_ns)


def _span_ns(begins_ns: Numbers) -> float:
    return float(begins_ns[-1] - begins_ns[0]) if len(begins_ns) else 0.0


def _counted(path: Path, start_ns: int, end_ns: int) -> tuple[Numbers, Numbers]:
    """Return the times of samples and the bytes from each to the next, NaN after a reset, of the busiest interface.

    The bytes are those of frames on the wire in its busier direction.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist: record the job with the collector nic")
    log = CounterLog(path)
    names = log.file.index if log.file else ()
    sides = [name.removesuffix("_bytes") for name in names if name.endswith(("rx_bytes", "tx_bytes"))]
    sides = [side for side in sides if side.split(".")[0] != _LOOPBACK and f"{side}_packets" in names]
    times_ns = log.times_ns(start_ns - 10**9, end_ns + 2 * 10**9)[-_MAX_SAMPLES:]
    if len(times_ns) < 2 or not sides:
        raise UsageError(f"{path} has no counters of an interface at the time of the iterations")
    steps = {
        side: [log.steps(f"{side}_{what}", times_ns[0], times_ns[-1]) for what in ("bytes", "packets")]
        for side in sides
    }
    side = max(sides, key=lambda name: sum(size or 0.0 for size in steps[name][0]))
    mtu = log.mtu(side.rpartition(".")[0])
    sizes = [
        np.nan if size is None or packets is None else frame_bytes(size, packets, mtu)
        for size, packets in zip(*steps[side], strict=True)
    ]
    return np.array(times_ns, np.float64), np.array(sizes)


def _known(t_ns: Numbers, steps_bytes: Numbers, begins_ns: Numbers, ends_ns: Numbers, period_ns: float) -> Integers:
    """Return the numbers of the iterations of which all that was counted is known: no reset, and no long gap.

    Args:
        t_ns: times of the samples.
        steps_bytes: bytes from each sample to the next; NaN: not known.
        begins_ns: begins of the iterations.
        ends_ns: their ends.
        period_ns: their usual length.
    """
    gaps_ns = np.diff(t_ns)
    unknown = np.isnan(steps_bytes) | (gaps_ns > longest_gap_ns(period_ns, float(np.median(gaps_ns))))
    until = np.append(0, np.cumsum(unknown))
    first, last = np.searchsorted(t_ns, begins_ns, "right") - 1, np.searchsorted(t_ns, ends_ns)
    covered = np.flatnonzero((first >= 0) & (last < len(t_ns)))
    found: Integers = covered[until[last[covered]] == until[first[covered]]]
    return found
