"""Divides the mean iteration into parts that add up: work of the ranks, waiting for slow ranks, and the network.

The work of a rank is its iteration without the communication after its last gradient. In each iteration, the others
wait for the rank with the most work. What they wait longer is the network's part, with the skew in which an exchange
ends. These are durations, each by the clock of its own rank: no two clocks are compared. A part is then divided by its
causes, each by a rule that needs evidence (docs/commands/analyze.md); what no rule claims stays in the part.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from scipy import ndimage, stats

from ringtap.analysis.job.change_point_interval import deviation, independent_share

if TYPE_CHECKING:  # the live view has no pandas
    from ringtap.analysis.runs.samples_to_iterations import Integers, Numbers

Mask = npt.NDArray[np.bool_]
Method = Literal["auto", "exact"]

# parts in which nothing is wrong, by the order in which they are shown
WORK = ("compute", "backward", "optimizer", "elsewhere", "outside")
# kinds of work by the source of their times: nothing times the forward pass of a Horovod job
_WORK_OF = {"ddp": ("compute", "optimizer", "elsewhere"), "horovod": ("backward", "optimizer", "outside")}
NETWORK = ("bandwidth", "network")
UNEVEN = "uneven ranks"
# causes that can be removed
SLOW_RANK, BUSY_PROCESSORS, STALL = "slow rank", "busy processors", "stalls"
OTHER_TRAFFIC, LOSS, SLOW_LINK, BUFFERS = "other traffic", "loss", "slow link", "socket buffers"
UNUSED_INTERFACE = "unused interface"
NETWORK_STALL, SLOWER_NETWORK = "network stalls", "slower network"
# of iterations of which only the length is known: the part that has no cause, and what may be a rank or the network
WHOLE = "iteration"
WHOLE_STALL, SLOWER_WHOLE = "stalled iterations", "slower iterations"
STALLS = (STALL, NETWORK_STALL, WHOLE_STALL)
_OF_WHOLE = {NETWORK_STALL: WHOLE_STALL, SLOWER_NETWORK: SLOWER_WHOLE}
CAUSES = (
    *(SLOW_RANK, BUSY_PROCESSORS, STALL, OTHER_TRAFFIC, LOSS, SLOW_LINK, UNUSED_INTERFACE, BUFFERS),
    *(SLOWER_NETWORK, NETWORK_STALL, SLOWER_WHOLE, WHOLE_STALL),
)

# a stall exceeds the median of so many iterations around it by this share of an iteration, and by so many standard
# deviations of the others
_AROUND, _STALL_SHARE, _STALL_SIGMAS = 31, 0.1, 6.0
# a stall that is less than this share of the median one has another reason, and its time stays in its part
_TYPICAL_SHARE = 0.5
# a rank is slow where its median lateness exceeds this share of an iteration
MIN_SHARE = 0.02
# so often, at least, a slow rank is later than the median of the others in the time in which it is slow
_LATE_SHARE = 0.6
# chance that a rank or a difference of a healthy job is found
_CHANCE = 1e-3
# fewer iterations with a cause, or without it, are not compared
MIN_COMPARED = 8
# a step of so many standard deviations of the others is clear, in so many iterations at most
_CLEAR_SIGMAS, _EXACT = 6.0, 400
# what nothing explains is a cause only if it exceeds so many standard deviations of the others: some jobs exchange many
# small messages faster or slower for a while by themselves
_UNEXPLAINED_SIGMAS = 3.0
# traffic of others that is less than this share of the training's own counts as none
_QUIET_SHARE = 0.02
_MIN_LOST = 0.5
# means of so many successive stretches give the interval of a mean, as neighbouring iterations depend on each other
_STRETCHES, _MIN_STRETCHES = 20, 4
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class RankTimes:
    """Times of the iterations in which the phases of all ranks are known.

    Attributes:
        ranks: numbers of the ranks.
        iteration_s: length of each rank's iteration, from the end of its own previous one, shape (iterations, ranks).
        exposed_s: likewise, communication after the last gradient was ready.
        compute_s, optimizer_s: likewise, forward and backward passes (with Horovod, backward passes), and the
            optimizers' steps.
        overlap_s: likewise, communication during the backward pass.
        mean_s: mean length of the job's iterations, from the last rank's end to the last rank's end.
        source: ``ddp`` or ``horovod``; ``iteration`` if only the length of the job's iterations is known, which is
            that of the only rank here.
    """

    ranks: Integers
    iteration_s: Numbers
    exposed_s: Numbers
    compute_s: Numbers
    optimizer_s: Numbers
    overlap_s: Numbers
    mean_s: float
    source: str = "ddp"

    @classmethod
    def whole(cls, iteration_s: Numbers) -> RankTimes:
        """Return the times of iterations of which only the length is known."""
        column, none = iteration_s[:, np.newaxis], np.zeros((len(iteration_s), 1))
        mean_s = float(iteration_s.mean()) if len(iteration_s) else 0.0
        return cls(np.zeros(1, np.int64), column, none, none, none, none, mean_s, WHOLE)

    @cached_property
    def usual_s(self) -> float:
        """Median length of an iteration."""
        return float(np.median(self.iteration_s))

    @cached_property
    def work_s(self) -> dict[str, Numbers]:
        """Time of each kind of work, shape (iterations, ranks)."""
        times = self.compute_s, self.optimizer_s, self.elsewhere_s
        return dict(zip(_WORK_OF[self.source], times, strict=True))

    @cached_property
    def elsewhere_s(self) -> Numbers:
        """Time outside of the timed passes, the exchange and the optimizers, shape (iterations, ranks)."""
        return self.iteration_s - self.exposed_s - self.compute_s - self.optimizer_s


@dataclass(frozen=True)
class NetworkEvidence:
    """Records of the network in these iterations.

    Attributes:
        training_bytes: payload of the training between nodes, by iteration; None: not known.
        other_bytes: likewise, of all other traffic.
        lost_segments: segments that sockets sent again because the first one had not arrived; None: not known.
        line_s: the shortest time in which the interfaces carry the training's payload of an iteration; None: their
            capacity is not known.
        usual_line_s: the same if slow interfaces were as fast as the median of all.
        shared_line_s: the same as ``line_s`` with what other traffic leaves of the capacity.
        unused_line_s: the same over faster interfaces that all nodes have, but do not use; None: there are none.
        limited_share: share of the time in which the training's connections have data to send but full buffers at one
            of their ends limit them; of each iteration, or of all.
    """

    training_bytes: Numbers | None = None
    other_bytes: Numbers | None = None
    lost_segments: Numbers | None = None
    line_s: float | None = None
    usual_line_s: float | None = None
    shared_line_s: float | None = None
    unused_line_s: float | None = None
    limited_share: Numbers | float = 0.0


@dataclass(frozen=True)
class CauseOrPart:
    """The seconds of an iteration that a part or a cause has.

    Attributes:
        name: a part or one of `CAUSES`.
        each_s: of each iteration.
        seconds: mean over the iterations.
        low_s, high_s: 95 % interval of the mean; None with too few iterations.
        affected: the iterations in which it is.
        rank: the rank that causes it; None: no rank, or all.
        within: for a slow rank and for stalls, what takes longer: one of `WORK`.
        is_computed: True if the cost follows from capacities, and not from iterations without the cause.
        is_at_most: True if the cost may be less: communication that the delay hid would take longer without it, and
            how much is not known without the capacity of the interfaces.
        values: of each iteration, what is larger with the cause; None: only ``affected`` tells it.
    """

    name: str
    each_s: Numbers = field(repr=False)
    seconds: float
    low_s: float | None
    high_s: float | None
    affected: Mask = field(repr=False)
    rank: int | None = None
    within: str = ""
    is_computed: bool = False
    is_at_most: bool = False
    values: Numbers | None = field(default=None, repr=False)

    def since(self, begin: int) -> CauseOrPart:
        """Return the same of the iterations from number ``begin`` on, with its mean and interval in them."""
        own = _share(self.name, self.each_s[begin:], self.affected[begin:])
        affected = self.affected & (np.arange(len(self.affected)) >= begin)
        return replace(self, seconds=own.seconds, low_s=own.low_s, high_s=own.high_s, affected=affected)


@dataclass(frozen=True)
class Budget:
    """Parts and causes, which add up to the mean iteration.

    Attributes:
        iteration_s: mean length of the iterations.
        shares: parts and causes, without causes that were not found.
        uncosted: causes that are there, but whose cost is not known, with the reason.
    """

    iteration_s: float
    shares: tuple[CauseOrPart, ...]
    uncosted: tuple[tuple[str, str], ...]


def split(times: RankTimes, evidence: NetworkEvidence) -> Budget:
    """Divide the iterations into parts and causes.

    Raises:
        ValueError: the parts do not add up, as after a wrong join of the ranks.
    """
    if times.source == WHOLE:
        return _split_whole(times, evidence)
    count, ranks = times.exposed_s.shape
    rows = np.arange(count)
    all_work_s = times.iteration_s - times.exposed_s
    last = all_work_s.argmax(axis=1)
    is_other = np.ones((count, ranks), bool)
    is_other[rows, last] = ranks == 1  # a rank alone is all there is
    others = is_other.sum(axis=1)

    def of_others(values: Numbers) -> Numbers:
        mean: Numbers = np.where(is_other, values, 0.0).sum(axis=1) / others
        return mean

    left = {name: of_others(values) for name, values in times.work_s.items()}
    left[UNEVEN] = all_work_s[rows, last] - of_others(all_work_s)
    left["network"] = times.iteration_s.mean(axis=1) - all_work_s[rows, last]
    # the ends of the ranks' first and last iterations differ
    elsewhere = _WORK_OF[times.source][-1]
    left[elsewhere] = left[elsewhere] + (times.mean_s - float(times.iteration_s.mean()))
    hiding = _Hiding.of(times, last, evidence.line_s)
    hidden_s = hiding.longer_s if hiding.hidden_s is None else hiding.hidden_s
    left |= {} if evidence.line_s is None else {"bandwidth": np.zeros(count)}
    # first: a rank that is slow for a few iterations does not stall in each of them
    shares = _slow_ranks(times, left, all_work_s, last, hiding)
    shares += _stalls(times, left, last, hiding)
    found, uncosted = _network_causes(times, evidence, left, hidden_s)
    shares += found
    if evidence.line_s is not None:
        is_open = any(name == OTHER_TRAFFIC for name, _ in uncosted)
        costed = _by_capacity(evidence, is_open, times.overlap_s[rows, last], left)
        shares += costed
        uncosted = [(name, why) for name, why in uncosted if name not in {share.name for share in costed}]
    shares += [_share(name, values, values != 0) for name, values in left.items()]
    return _budget(times.mean_s, shares, uncosted)


def _split_whole(times: RankTimes, evidence: NetworkEvidence) -> Budget:
    """Divide iterations of which only the length is known, by those with a cause and without it."""
    left = {"network": times.iteration_s[:, 0]}
    found, uncosted = _network_causes(times, evidence, left, np.zeros(len(times.iteration_s)))
    shares = [replace(share, name=_OF_WHOLE.get(share.name, share.name)) for share in found]
    computed = {SLOW_LINK: evidence.usual_line_s, UNUSED_INTERFACE: evidence.unused_line_s}
    unknown = [name for name, line_s in computed.items() if line_s is not None]
    unknown += [BUFFERS] if np.any(evidence.limited_share) else []
    uncosted += [(name, "what the exchange takes is not known") for name in unknown]
    return _budget(times.mean_s, [*shares, _share(WHOLE, left["network"], left["network"] != 0)], uncosted)


def _budget(mean_s: float, shares: list[CauseOrPart], uncosted: list[tuple[str, str]]) -> Budget:
    total_s = sum(share.seconds for share in shares)
    if not abs(total_s - mean_s) <= 1e-6 * mean_s:
        raise ValueError(f"the parts of an iteration are {total_s} s in all, the iteration {mean_s} s")
    order = {name: number for number, name in enumerate((*WORK, WHOLE, *CAUSES, UNEVEN, *NETWORK))}
    return Budget(mean_s, tuple(sorted(shares, key=lambda one: order[one.name])), tuple(uncosted))


def _share(name: str, values: Numbers, affected: Mask, rank: int | None = None, within: str = "") -> CauseOrPart:
    """Return a share; its interval is from the iterations in which it is."""
    mean, part, half = float(values.mean()), values[affected], None
    stretches = min(_STRETCHES, len(part) // 2)
    if stretches >= _MIN_STRETCHES:
        means = [some.mean() for some in np.array_split(part, stretches)]
        error = float(np.std(means, ddof=1)) / np.sqrt(stretches) * len(part) / len(values)
        half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, stretches - 1)) * error
    low_s, high_s = (None, None) if half is None else (mean - half, mean + half)
    return CauseOrPart(name, values, mean, low_s, high_s, affected, rank, within)


@dataclass
class _Hiding:
    """Knows how much of the exchange the backward pass of a late rank hides.

    What the interfaces carry while the others wait for a late rank need not be sent after its last gradient. So a delay
    costs less than it takes, and that part of it belongs to the bandwidth.

    Attributes:
        hidden_s: in each iteration, what is hidden more than is usual; None: the capacity of interfaces is not known.
        longer_s: by how much the exchange begins earlier before the last gradient than is usual.
    """

    hidden_s: Numbers | None
    longer_s: Numbers

    @classmethod
    def of(cls, times: RankTimes, last: Integers, line_s: float | None) -> _Hiding:
        rows = np.arange(len(last))
        overlap_s, is_other = times.overlap_s[rows, last], np.ones(times.overlap_s.shape, bool)
        is_other[rows, last] = len(times.ranks) == 1
        usual_s = float(np.median(times.overlap_s[is_other]))
        hidden_s = None
        if line_s is not None:
            hidden_s = np.maximum(max(line_s - usual_s, 0.0) - np.maximum(line_s - overlap_s, 0.0), 0.0)
        return cls(hidden_s, np.maximum(overlap_s - usual_s, 0.0))

    def cost(self, share: CauseOrPart, delay_s: Numbers, left: dict[str, Numbers]) -> CauseOrPart:
        """Return what a delay costs, with the rest of ``share``; what it hides goes to the bandwidth."""
        if self.hidden_s is None:
            longer_s, delay_s = self.longer_s[share.affected], delay_s[share.affected]
            is_at_most = bool(longer_s.mean() > MIN_SHARE * delay_s.mean())
            return replace(share, is_at_most=is_at_most)
        kept_s = np.minimum(delay_s, self.hidden_s)
        self.hidden_s = self.hidden_s - kept_s
        left["bandwidth"] = left["bandwidth"] + kept_s
        return _share(share.name, delay_s - kept_s, share.affected, share.rank, share.within)


def _excess(values: Numbers, usual_s: float) -> tuple[Numbers, Mask]:
    """Return by how much values exceed the median around them, and in which iterations it is a stall."""
    if len(values) < MIN_COMPARED:
        return np.zeros(len(values)), np.zeros(len(values), bool)
    excess_s: Numbers = values - ndimage.median_filter(values, min(_AROUND, len(values)), mode="nearest")
    sigma_s = deviation(excess_s)
    least_s = max(_STALL_SHARE * usual_s, _STALL_SIGMAS * sigma_s)
    return excess_s, excess_s > least_s


def _typical(excess_s: Numbers, stalled: Mask) -> Mask:
    """Return the stalls that are not much shorter than the others."""
    return stalled & (excess_s >= _TYPICAL_SHARE * float(np.median(excess_s[stalled])))


def _stalls(times: RankTimes, left: dict[str, Numbers], last: Integers, hiding: _Hiding) -> list[CauseOrPart]:
    """Take the stalls of single ranks, and of all, out of the parts."""
    found = []
    for name in times.work_s:
        excess_s, stalled = _excess(left[name], times.usual_s)
        if stalled.any():
            stalled = _typical(excess_s, stalled)
            cost_s = np.where(stalled, excess_s, 0.0)
            left[name] = left[name] - cost_s
            found.append(hiding.cost(_share(STALL, cost_s, stalled, within=name), cost_s, left))
    excess_s, stalled = _excess(left[UNEVEN], times.usual_s)
    for number in np.unique(last[stalled]).tolist():
        mine = _typical(excess_s, stalled & (last == number))
        cost_s = np.where(mine, excess_s, 0.0)
        left[UNEVEN] = left[UNEVEN] - cost_s
        share = _share(STALL, cost_s, mine, int(times.ranks[number]), _slower_than_usual_in(times, number, mine))
        found.append(hiding.cost(share, cost_s, left))
    return found


def _slower_than_usual_in(times: RankTimes, number: int, rows: Mask) -> str:
    """Return the kind of work in which a rank loses most time in some iterations, against its other iterations."""
    longer_s = {
        name: float(np.median(values[rows, number]) - np.median(values[~rows, number]))
        for name, values in times.work_s.items()
    }
    return max(longer_s, key=lambda name: longer_s[name])


def _slower_than_others_in(times: RankTimes, number: int, rows: Mask) -> str:
    """Return the kind of work in which a rank loses most time in some iterations, against the other ranks."""
    others = np.arange(len(times.ranks)) != number
    longer_s = {
        name: float((values[rows, number] - values[rows][:, others].mean(axis=1)).mean())
        for name, values in times.work_s.items()
    }
    return max(longer_s, key=lambda name: longer_s[name])


def _slow_ranks(
    times: RankTimes, left: dict[str, Numbers], work_s: Numbers, last: Integers, hiding: _Hiding
) -> list[CauseOrPart]:
    """Take what ranks cost that are slow throughout, or for a while, out of the waiting.

    The cost is what the most work would be less if each slow rank had as much as the median of the others.
    """
    count, ranks = work_s.shape
    if ranks < 2 or count < MIN_COMPARED:
        return []
    shift_s, late_s = np.zeros((count, ranks)), work_s - _medians_of_others(work_s)
    for number in range(ranks):
        least_s = MIN_SHARE * times.usual_s
        for span in _late_spans(late_s[:, number], _CHANCE / ranks):
            by_s = float(np.median(late_s[span, number]))
            if by_s > least_s:
                shift_s[span, number] = by_s
        if not shift_s[:, number].any():
            # a rank that became slow is told from itself, in fewer iterations than from the others
            later = _slower_stretch(late_s[:, number], least_s, _CHANCE / ranks)
            by_s = float(np.median(late_s[later, number])) if later.any() else 0.0
            if by_s > least_s:
                shift_s[later, number] = by_s
    saved_s = work_s[np.arange(count), last] - (work_s - shift_s).max(axis=1)
    found = []
    for number in np.flatnonzero(shift_s.any(axis=0)).tolist():
        cost_s = np.where(last == number, saved_s, 0.0)
        slow = shift_s[:, number] > 0
        within = _slower_than_others_in(times, number, slow)
        # if several ranks are slow, what those cost that have not the most work is in the work of the others
        waited_s = np.minimum(cost_s, left[UNEVEN])
        left[UNEVEN] = left[UNEVEN] - waited_s
        left[within] = left[within] - (cost_s - waited_s)
        share = _share(SLOW_RANK, cost_s, slow, int(times.ranks[number]), within)
        found.append(replace(hiding.cost(share, cost_s, left), values=late_s[:, number]))
    return found


def _medians_of_others(values: Numbers) -> Numbers:
    """Return for each value the median of the others in its row."""
    order = values.argsort(axis=1)
    place, ranked = order.argsort(axis=1), np.take_along_axis(values, order, axis=1)
    others = values.shape[1] - 1
    # of the others, those from a value's own place on are one place further
    low, high = (
        np.where(place > middle, ranked[:, [middle]], ranked[:, [middle + 1]])
        for middle in ((others - 1) // 2, others // 2)
    )
    medians: Numbers = (low + high) / 2
    return medians


def _late_spans(late_s: Numbers, chance: float) -> list[slice]:
    """Return the spans in which a rank is late too often for chance, which makes a rank late in half of them."""
    found, open_spans = [], [(0, len(late_s))]
    spans = max(len(late_s) ** 2 / 2, 1.0)
    score = np.where(late_s > 0, 1 - _LATE_SHARE, -_LATE_SHARE)
    while open_spans:
        begin, end = open_spans.pop()
        first, after = _largest_sum(score[begin:end])
        late = late_s[begin + first : begin + after]
        if not len(late) or stats.binom.sf((late > 0).sum() - 1, len(late), 0.5) >= chance / spans:
            continue
        # the ends are where it is nearer to its lateness than to none
        by_s = float(np.median(late))
        first, after = _largest_sum(np.clip(late_s[begin:end] - by_s / 2, -by_s, by_s))
        found.append(slice(begin + first, begin + after))
        open_spans += [(begin, begin + first), (begin + after, end)]
    return found


def _largest_sum(score: Numbers) -> tuple[int, int]:
    """Return the begin and the end of the stretch with the largest sum; an empty one if no value is positive."""
    total = np.concatenate(([0.0], np.cumsum(score)))
    least = np.minimum.accumulate(total)
    end = int((total - least).argmax())
    return int(total[: end + 1].argmin()), end


def _network_causes(
    times: RankTimes, evidence: NetworkEvidence, left: dict[str, Numbers], hidden_s: Numbers
) -> tuple[list[CauseOrPart], list[tuple[str, str]]]:
    """Take what other traffic and loss cost out of the network's part, by iterations with them and without.

    While the others wait for a late rank, a part of the exchange may pass, which is at most ``hidden_s``. So iterations
    are compared with this and without it, and a difference counts if both show it. Iterations with a cause are left out
    of the search for what nothing explains: with its cost taken out, they would all take the same time, and the noise
    would seem less than it is.
    """
    network_s = left["network"]
    costs_s: dict[str, Numbers] = {}
    uncosted: dict[str, str] = {}
    clear, taken = np.ones(len(network_s), bool), np.zeros(len(network_s), bool)

    def take(name: str, rows: Mask, cost_s: Numbers) -> None:
        nonlocal network_s
        cost_s = np.where(rows, cost_s, 0.0)
        costs_s[name] = costs_s.get(name, np.zeros(len(rows))) + cost_s
        network_s = network_s - cost_s
        taken[rows] = True

    def stalls() -> tuple[Numbers, Mask]:
        excess_s, stalled = np.zeros(len(taken)), np.zeros(len(taken), bool)
        excess_s[~taken], stalled[~taken] = _excess(network_s[~taken], times.usual_s)
        return excess_s, stalled

    def compare(name: str, rows: Mask) -> None:
        """Take what the network takes longer in some of the clear iterations than in the others."""
        mine, without = rows & clear, ~rows & clear
        if mine.any() and without.sum() < MIN_COMPARED:
            uncosted[name] = f"{without.sum()} of {len(rows)} iterations are without it"
        elif mine.any():
            cost_s = network_s - network_s[without].mean()
            is_more = all(_are_more(values, mine, without) for values in (network_s, network_s + hidden_s))
            if is_more and cost_s[mine].mean() > 0:
                take(name, mine, cost_s)

    if evidence.other_bytes is not None and evidence.training_bytes is not None:
        usual_bytes = float(np.median(evidence.training_bytes))
        loaded = (evidence.other_bytes > _QUIET_SHARE * usual_bytes) & (usual_bytes > 0)
        compare(OTHER_TRAFFIC, loaded)
        clear = clear & ~loaded
    if evidence.lost_segments is not None:
        lossy = evidence.lost_segments >= _MIN_LOST
        compare(LOSS, lossy)
        excess_s, stalled = stalls()
        if (stalled & lossy).any():
            take(LOSS, stalled & lossy, excess_s)
    excess_s, stalled = stalls()
    if evidence.lost_segments is not None:
        stalled &= evidence.lost_segments < _MIN_LOST
    if stalled.any():
        take(NETWORK_STALL, _typical(excess_s, stalled), excess_s)
    least_s, rows, values = MIN_SHARE * times.usual_s, ~taken, {SLOWER_NETWORK: network_s}
    slower = np.zeros(len(taken), bool)
    if rows.sum() >= 2 * MIN_COMPARED:
        slower[rows] = _slower_stretch(network_s[rows], least_s, sigmas=_UNEXPLAINED_SIGMAS)
    if slower.any() and _median_difference((network_s + hidden_s)[rows], slower[rows]) >= least_s:
        take(SLOWER_NETWORK, slower, network_s - network_s[rows & ~slower].mean())
    left["network"] = network_s
    shares = [_share(name, cost_s, cost_s != 0) for name, cost_s in costs_s.items()]
    return [replace(share, values=values.get(share.name)) for share in shares], list(uncosted.items())


def _are_more(values: Numbers, mine: Mask, others: Mask) -> bool:
    """Return True if values are higher than others, and not by chance."""
    return bool(stats.mannwhitneyu(values[mine], values[others], alternative="greater").pvalue <= _CHANCE)


def _median_difference(values: Numbers, mine: Mask) -> float:
    return float(np.median(values[mine]) - np.median(values[~mine]))


def _slower_stretch(values: Numbers, least_s: float, chance: float = _CHANCE, sigmas: float = 0.0) -> Mask:
    """Return the iterations of the stretch, or before and after it, in which values are higher; none if none are.

    They are by ``least_s``, and by so many standard deviations of the others (median).

    A clear step is found in fewer iterations: its chance is calculated exactly, and not by the normal distribution.
    """
    total = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    first, after = sorted((int(total.argmin()), int(total.argmax())))
    inside = np.zeros(len(values), bool)
    inside[first:after] = True
    if min(inside.sum(), (~inside).sum()) < MIN_COMPARED:
        return np.zeros(len(values), bool)
    slower = inside if values[inside].mean() > values[~inside].mean() else ~inside
    by_s = _median_difference(values, slower)
    rest = values - np.where(slower, np.median(values[slower]), np.median(values[~slower]))
    sigma_s = deviation(rest[~slower])
    method: Method = "exact" if by_s > _CLEAR_SIGMAS * sigma_s and len(values) <= _EXACT else "auto"
    p = stats.mannwhitneyu(values[slower], values[~slower], alternative="greater", method=method).pvalue
    # successive iterations depend on each other, and the stretch was chosen among all of them
    p = stats.norm.sf(stats.norm.isf(p) * np.sqrt(independent_share(rest)))
    is_found = by_s >= max(least_s, sigmas * sigma_s) and p < chance / len(values) ** 2
    return slower if is_found else np.zeros(len(values), bool)


def _by_capacity(
    evidence: NetworkEvidence, is_shared: bool, overlap_s: Numbers, left: dict[str, Numbers]
) -> list[CauseOrPart]:
    """Take the time that the interfaces need for the training's bytes out of the network's part.

    What they carry during the backward pass is not in it. Of the rest, full buffers have the share of the time in which
    they limit the connections. ``is_shared`` is true if other traffic is there throughout, so that only the capacity
    says what it costs.
    """
    assert evidence.line_s is not None

    def needed_s(line_s: float) -> Numbers:
        seconds: Numbers = np.clip(line_s - overlap_s, 0, np.maximum(network_s, 0))
        return seconds

    network_s = left["network"]
    line_s = needed_s(evidence.line_s)
    usual_s, shared_s = line_s, line_s
    if evidence.usual_line_s is not None:
        usual_s = np.minimum(needed_s(evidence.usual_line_s), line_s)
    best_s = usual_s if evidence.unused_line_s is None else np.minimum(needed_s(evidence.unused_line_s), usual_s)
    if is_shared and evidence.shared_line_s is not None:
        shared_s = np.maximum(needed_s(evidence.shared_line_s), line_s)
    left["network"] = network_s - shared_s
    left["bandwidth"] = left["bandwidth"] + best_s
    limited_s = evidence.limited_share * np.maximum(left["network"], 0)
    left["network"] = left["network"] - limited_s
    costs_s = {OTHER_TRAFFIC: shared_s - line_s, BUFFERS: limited_s}
    costs_s |= {SLOW_LINK: line_s - usual_s, UNUSED_INTERFACE: usual_s - best_s}
    return [
        replace(_share(name, cost_s, cost_s > 0), is_computed=True)
        for name, cost_s in costs_s.items()
        if cost_s.mean() > 0
    ]
