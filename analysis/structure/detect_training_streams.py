"""Finds the streams of a training job, and the starts of its iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ringtap.analysis.runs.traffic_classes import CROSS, OTHER, TRAINING
from ringtap.analysis.structure.gradient_evidence import MIN_ITERATION_BYTES, why_not_gradients
from ringtap.analysis.structure.payload_time_series import PayloadStream, Streams
from ringtap.analysis.structure.period_from_silences import Integers, Periodicity, find_periodicity
from ringtap.core.units import counted, format_duration, format_size

# streams with a smaller share of all payload are not examined
_MIN_SHARE = 0.0005
_MAX_STREAMS = 64
MIN_CONFIDENCE = 0.99
# starts of two streams of one job lie within this share of the period
_NEAR = 0.3
# starts of several streams count if they are this close to their median, as a share of the period
_CLOSE = 0.1
_MATCHED = 0.8
# bins without payload before the start of an iteration, among all streams of a job
_SILENT_BINS = 4
# a stream with less than this share of the job's largest one is control traffic
MAJOR_SHARE = 0.05
# other streams between two hosts count as cross traffic from this share of all payload
_CROSS_SHARE = 0.01
# limits for a stream without its own periodicity: spread of bytes per iteration, and rate in silences over mean rate
_SAME_BYTES, _SILENT_RATE = 0.05, 0.2


@dataclass(frozen=True, eq=False)
class Member:
    """A stream of the job.

    Attributes:
        stream: the stream.
        rhythm: its own periodicity; None if it is not clear, and the stream shares the iterations of the others.
        volume: payload bytes per iteration, median.
        major: True if it carries gradients; False: control traffic.
    """

    stream: PayloadStream
    rhythm: Periodicity | None
    volume: float
    major: bool


@dataclass(frozen=True, eq=False)
class Training:
    """A training job as seen in its packets.

    Attributes:
        members: its streams, largest volume first.
        starts: bin in which each iteration's communication begins, ascending.
        found: True for starts that follow a silence.
        reference: the member with the clearest periodicity.
        rhythm: periodicity of the job: that of the reference, or of the sum of streams that begin at different times.
        one_way: True if only one direction of the connections was captured.
        pause_after: number of iterations after which a longer pause follows each time, in which hosts exchange small
            messages, as in an evaluation; 0: there is none.
    """

    members: tuple[Member, ...]
    starts: Integers
    found: npt.NDArray[np.bool_]
    reference: Member
    rhythm: Periodicity
    one_way: bool
    pause_after: int = 0

    @property
    def major(self) -> list[Member]:
        """Members that carry gradients."""
        return [member for member in self.members if member.major]

    @property
    def volumes(self) -> list[tuple[PayloadStream, float]]:
        """Streams that carry gradients, with their payload bytes per iteration."""
        return [(member.stream, member.volume) for member in self.major]


@dataclass(frozen=True, eq=False)
class Sorted:
    """Classes of all streams.

    Attributes:
        training: the job; None if there is none.
        why: without a job, a sentence that describes the traffic; else empty.
        kinds: class and reason of each stream, in the order of the streams.
        rivals: other periodic exchanges, a few words each.
    """

    training: Training | None
    why: str
    kinds: tuple[tuple[str, str], ...]
    rivals: tuple[str, ...] = ()


def sort_out(streams: Streams) -> Sorted:
    """Classify streams, and find those of the training job."""
    examined = [one for one in streams.streams[:_MAX_STREAMS] if one.total >= _MIN_SHARE * streams.total]
    rhythms: dict[PayloadStream, Periodicity | None] = {}
    clear: dict[PayloadStream, Periodicity] = {}
    for stream in examined:
        known = sorted({round(rhythm.volume) for rhythm in clear.values()})
        rhythm = rhythms[stream] = find_periodicity(stream.bins, stream.payload, known)
        if rhythm is not None and rhythm.confidence >= MIN_CONFIDENCE:
            clear[stream] = rhythm
    found = _combined(streams, clear)
    covered = [{member.stream for member in training.members} for training in found]
    groups = [group for group in _groups(clear) if not any(members >= set(group) for members in covered)]
    found += [_training(streams, clear, group) for group in groups]
    found = [_between_pauses(streams, clear, training) or training for training in found]
    lacking = {training: why_not_gradients(training.volumes) for training in found}
    found = [training for training in found if not lacking[training]]
    both_ways = [training for training in found if _exchanges([member.stream for member in training.major])]
    one_way = [training for training in found if training.one_way]
    for candidates in (both_ways, one_way):
        if candidates:
            best = max(candidates, key=_weight)
            mine = {member.stream for member in best.members}
            rivals = tuple(
                _repeats(training.reference.stream, clear, streams)
                for training in candidates
                if not mine & {member.stream for member in training.members}
            )
            return Sorted(best, "", _kinds(streams, best, rhythms), rivals)
    return Sorted(None, _why_none(streams, rhythms, clear, lacking), _kinds(streams, None, rhythms))


def _weight(training: Training) -> tuple[int, bool, int]:
    """Return the rank of a candidate: by payload.

    If the same streams have two periods, the one whose silences stand out ranks higher, then the shorter one.
    """
    stands_out = training.rhythm.silence_bins > training.rhythm.other_bins
    payload = sum(member.stream.total for member in training.major)
    return payload, stands_out, len(training.starts)


def _groups(rhythms: dict[PayloadStream, Periodicity]) -> list[list[PayloadStream]]:
    """Group the streams whose iterations begin together."""
    groups: list[list[PayloadStream]] = []
    for stream in sorted(rhythms, key=lambda one: -one.total):
        for group in groups:
            if _together(rhythms[group[0]].starts, rhythms[stream].starts):
                group.append(stream)
                break
        else:
            groups.append([stream])
    return groups


def _together(a: Integers, b: Integers, near: float = _NEAR) -> bool:
    """True if two sequences of starts match one to one at a constant lag, below ``near`` of a period."""
    if min(len(a), len(b)) < _MATCHED * max(len(a), len(b)):
        return False
    begin, end = max(a[0], b[0]), min(a[-1], b[-1])
    period = float(np.median(np.diff(a)))
    a = a[(a >= begin - _NEAR * period) & (a <= end + _NEAR * period)]
    b = b[(b >= begin - _NEAR * period) & (b <= end + _NEAR * period)]
    if len(a) < 3 or len(b) < 3 or min(len(a), len(b)) < _MATCHED * max(len(a), len(b)):
        return False
    lag = nearest(b, a) - a
    usual = np.median(lag)
    return bool((np.abs(lag - usual) <= _CLOSE * period).mean() >= _MATCHED and abs(usual) <= near * period)


def nearest(values: Integers, to: Integers) -> Integers:
    """Return for each of ``to`` the nearest of ascending values."""
    index = np.clip(np.searchsorted(values, to), 1, len(values) - 1)
    below, above = values[index - 1], values[index]
    return np.where(to - below <= above - to, below, above)


def _exchanges(streams: Sequence[PayloadStream]) -> bool:
    """True if a host both sends and receives gradients: traffic in one direction is not a collective."""
    return bool({stream.source for stream in streams} & {stream.destination for stream in streams})


def _training(streams: Streams, clear: Mapping[PayloadStream, Periodicity], group: Sequence[PayloadStream]) -> Training:
    """Build a job from streams with a common period, and add the streams that share its iterations."""
    rhythms = {stream: clear[stream] for stream in group}
    largest = max(rhythm.volume for rhythm in rhythms.values())
    major = [stream for stream, rhythm in rhythms.items() if rhythm.volume >= MAJOR_SHARE * largest]
    reference = max(major, key=lambda one: (round(rhythms[one].found_share, 2), rhythms[one].volume, one.total))
    rhythm = rhythms[reference]
    period = float(np.median(np.diff(rhythm.starts)))
    starts, found, shared = _common_starts(rhythm, [rhythms[stream] for stream in major], period)
    volumes = {stream: one.volume for stream, one in rhythms.items()}
    return _with_members(streams, clear, volumes, starts[shared], found[shared], reference, rhythm)


def _with_members(
    streams: Streams,
    clear: Mapping[PayloadStream, Periodicity],
    volumes: dict[PayloadStream, float],
    starts: Integers,
    found: npt.NDArray[np.bool_],
    reference: PayloadStream,
    rhythm: Periodicity,
) -> Training:
    """Build a job, and add the streams that share its iterations to those whose bytes per iteration are known."""
    largest = max(volumes.values())
    major = [stream for stream, volume in volumes.items() if volume >= MAJOR_SHARE * largest]
    hosts = {host for stream in major for host in stream.ends}
    # if the other direction has no clear periodicity, its host may not be known yet
    complete = _exchanges(major)
    one_way = not any(stream.answered for stream in volumes)
    for stream in streams.streams:
        pair = {stream.source, stream.destination}
        if stream not in volumes and (pair <= hosts if complete else pair & hosts):
            volume = _shared_volume(stream, starts, rhythm)
            if volume is not None:
                volumes[stream] = volume
    volumes = _with_ways_back(streams, volumes)
    largest = max(volumes.values())  # those that were added may be larger
    members = [
        Member(stream, clear.get(stream), volume, volume >= MAJOR_SHARE * largest) for stream, volume in volumes.items()
    ]
    members.sort(key=lambda member: -member.volume)
    first = next(member for member in members if member.stream is reference)
    return Training(tuple(members), starts, found, first, rhythm, one_way)


def _with_ways_back(streams: Streams, volumes: Mapping[PayloadStream, float]) -> dict[PayloadStream, float]:
    """Return bytes per iteration, also of the streams that send as much as the other way of their connection.

    Where many senders meet, retransmissions may hide the rhythm of one.
    """
    by_ends = {(one.source, one.destination, one.ports): one for one in volumes}
    found = dict(volumes)
    for stream in streams.streams:
        ports = " > ".join(reversed(stream.ports.split(" > ")))
        other = by_ends.get((stream.destination, stream.source, ports))
        if stream not in found and other is not None and abs(stream.total / other.total - 1) <= _SAME_BYTES:
            found[stream] = volumes[other] * stream.total / other.total
    return found


def _combined(streams: Streams, clear: Mapping[PayloadStream, Periodicity]) -> list[Training]:
    """Return the jobs whose streams begin at different times.

    In a tree, the gradients of an iteration come down when they have gone up, and a stream may be silent longer between
    these two than between iterations. Their sum is silent between iterations only.
    """
    found = []
    for chosen in _connected([stream for stream in clear if stream.answered]):
        if not all(_together(clear[chosen[0]].starts, clear[stream].starts, _CLOSE) for stream in chosen):
            training = _by_sum(streams, clear, chosen) or _by_turns(streams, clear, chosen)
            found += [] if training is None else [training]
    return found


def _by_sum(
    streams: Streams, clear: Mapping[PayloadStream, Periodicity], chosen: Sequence[PayloadStream]
) -> Training | None:
    """Return the job whose iterations the sum of some streams shows, without those that have no part in them."""
    while len(chosen) > 1:
        payload = streams.dense(chosen)
        bins = np.flatnonzero(payload).astype(np.int64)
        rhythm = find_periodicity(bins, payload[bins])
        if rhythm is None or rhythm.confidence < MIN_CONFIDENCE:
            break
        volumes = {
            stream: volume
            for stream in chosen
            if (volume := _steady_volume(stream, rhythm.starts)) is not None
            and _is_multiple(volume, clear[stream].volume)
        }
        if len(volumes) == len(chosen):
            reference = max(chosen, key=lambda one: one.total)
            return _with_members(streams, clear, volumes, rhythm.starts, rhythm.found, reference, rhythm)
        chosen = list(volumes)
    return None


def _by_turns(
    streams: Streams, clear: Mapping[PayloadStream, Periodicity], chosen: Sequence[PayloadStream]
) -> Training | None:
    """Return the job of streams that begin in turns, each once per iteration, if stalls hide the rhythm of their sum.

    The iteration begins with the streams before which all are silent most often.
    """
    payload = streams.dense(chosen)
    passed = np.concatenate(([0], np.cumsum(payload)))

    def silent(stream: PayloadStream) -> float:
        starts = clear[stream].starts
        return float((passed[starts] == passed[np.maximum(starts - _SILENT_BINS, 0)]).mean())

    first = max(chosen, key=lambda one: (round(silent(one), 1), one.total))
    mine = {one: clear[one] for one in chosen if _in_turns(clear[first].starts, clear[one].starts)}
    at_first = [one for one, rhythm in mine.items() if _together(clear[first].starts, rhythm.starts)]
    if len(at_first) == len(mine):
        return None
    begin = _training(streams, clear, at_first)
    volumes = {one: rhythm.volume for one, rhythm in mine.items()}
    return _with_members(streams, clear, volumes, begin.starts, begin.found, begin.reference.stream, begin.rhythm)


def _in_turns(a: Integers, b: Integers) -> bool:
    """True if one start of the second sequence lies between most of the successive starts of the first one."""
    counts = np.bincount(np.searchsorted(a, b, side="right"), minlength=len(a) + 1)[1:-1]
    return bool(len(counts) and (counts == 1).mean() >= _MATCHED)


def _connected(streams: list[PayloadStream]) -> list[list[PayloadStream]]:
    """Return the streams between hosts that send and receive, together if they have hosts in common."""
    while True:
        both = {stream.source for stream in streams} & {stream.destination for stream in streams}
        left = [stream for stream in streams if {stream.source, stream.destination} <= both]
        if len(left) == len(streams):
            break
        streams = left
    parts: list[tuple[set[str], list[PayloadStream]]] = []
    for stream in streams:
        hosts, mine = {stream.source, stream.destination}, [stream]
        for part in [part for part in parts if part[0] & hosts]:
            parts.remove(part)
            hosts, mine = hosts | part[0], mine + part[1]
        parts.append((hosts, mine))
    return [mine for _, mine in parts]


def _is_multiple(volume: float, part: float) -> bool:
    """True if a volume is up to four times another one, or half of it."""
    ratio = volume / part
    return any(abs(ratio / times - 1) <= _SAME_BYTES for times in (0.5, 1, 2, 3, 4))


def _between_pauses(
    streams: Streams, clear: Mapping[PayloadStream, Periodicity], training: Training
) -> Training | None:
    """Return the job whose iterations are parts of those given, between pauses for an evaluation; None if it has none.

    In a pipeline a stream also pauses after several equal parts, but other streams of the job send meanwhile.
    """
    rhythms = {member.stream: member.rhythm for member in training.major if member.rhythm is not None}
    shorter = {stream: rhythm.between_pauses for stream, rhythm in rhythms.items() if rhythm.between_pauses is not None}
    if training.rhythm.between_pauses is None or len(shorter) < len(rhythms):
        return None
    if not all(_together(training.rhythm.between_pauses.starts, each.starts) for each in shorter.values()):
        return None
    hosts = {host for stream in shorter for host in stream.ends}
    payload = streams.dense([one for one in streams.streams if {one.source, one.destination} <= hosts])
    passed = np.concatenate(([0], np.cumsum(payload)))
    starts = training.starts[1:]
    pause = max(round(_MATCHED * training.rhythm.silence_bins), 1)
    in_pauses = (passed[starts] - passed[np.maximum(starts - pause, 0)]).mean() / pause
    if in_pauses > _SILENT_RATE * payload[training.starts[0] : training.starts[-1]].mean():
        return None
    found = _training(streams, {**clear, **shorter}, list(shorter))
    return replace(found, pause_after=training.rhythm.parts)


def _common_starts(
    reference: Periodicity, of_streams: Sequence[Periodicity], period: float
) -> tuple[Integers, npt.NDArray[np.bool_], slice]:
    """Find the first start of each iteration over all streams, without streams that are far from the others.

    Returns:
        Starts near those of the reference; a mask of those at which any stream had a silence; and a slice without
        starts at either end that most streams lack, such as a broadcast of parameters before training.
    """
    at = reference.starts
    each = np.array([nearest(rhythm.starts[rhythm.found], at) for rhythm in of_streams])
    near = np.abs(each - at) <= _NEAR * period
    found = np.asarray(near.any(axis=0))
    middle = np.array(
        [np.median(column[mine]) if mine.any() else 0 for column, mine in zip(each.T, near.T, strict=True)]
    )
    close = near & (np.abs(each - middle) <= _CLOSE * period)
    close |= near & ~close.any(axis=0)
    first = np.where(close, each, np.iinfo(np.int64).max).min(axis=0)
    most = np.flatnonzero(near.sum(axis=0) > len(of_streams) / 2)
    return np.where(found, first, at), found, slice(int(most[0]), int(most[-1]) + 1)


def _volumes(stream: PayloadStream, edges: Integers) -> Integers:
    """Return the bytes of a stream in each iteration between ascending bins."""
    iteration = np.searchsorted(edges, stream.bins, side="right") - 1
    inside = (iteration >= 0) & (iteration < len(edges) - 1)
    return np.bincount(iteration[inside], stream.payload[inside], len(edges) - 1)


def _steady_volume(stream: PayloadStream, edges: Integers) -> float | None:
    """Return the bytes per iteration of a stream that sends equal amounts in most of them; else None."""
    volumes = _volumes(stream, edges)
    median = float(np.median(volumes))
    # a sender at constant rate sends more in a slow iteration
    steady = median > 0 and float((np.abs(volumes - median) <= _SAME_BYTES * median).mean()) >= _MATCHED
    return median if steady else None


def _shared_volume(stream: PayloadStream, starts: Integers, rhythm: Periodicity) -> float | None:
    """Return the bytes per iteration of a stream that sends equal amounts in each and little in silences; else None."""
    # the silence before a start is not part of the iteration that it begins
    edges = starts - max(int(rhythm.silence_bins) // 2, 1)
    median = _steady_volume(stream, edges)
    if median is None:
        return None
    inside = (stream.bins >= edges[0]) & (stream.bins < edges[-1])
    quiet = max(int(rhythm.silence_bins * 0.6), 1)
    at_end = starts[np.clip(np.searchsorted(starts, stream.bins, side="right"), 0, len(starts) - 1)]
    silent = inside & (at_end - stream.bins <= quiet) & (at_end > stream.bins)
    share = float(stream.payload[silent].sum()) / float(stream.payload[inside].sum())
    expected = quiet * (len(starts) - 1) / float(starts[-1] - starts[0])
    return median if share <= _SILENT_RATE * expected else None


def _kinds(
    streams: Streams, training: Training | None, rhythms: dict[PayloadStream, Periodicity | None]
) -> tuple[tuple[str, str], ...]:
    members = {} if training is None else {member.stream: member for member in training.members}
    between: dict[tuple[str, str], int] = {}
    for stream in streams.streams:
        if stream not in members:
            between[stream.ends] = between.get(stream.ends, 0) + stream.total
    result = []
    for stream in streams.streams:
        if stream in members:
            member = members[stream]
            how = "the same bytes in every iteration" if member.major else "in step with the iterations, but little"
            result.append((TRAINING, how))
        else:
            much = between[stream.ends] >= _CROSS_SHARE * streams.total
            kind = CROSS if much else OTHER
            result.append((kind, describe(stream, rhythms.get(stream), streams)))
    return tuple(result)


def describe(stream: PayloadStream, rhythm: Periodicity | None, streams: Streams) -> str:
    """Describe a stream that is not training, in a few words."""
    if stream.flows > 1:
        return counted(stream.flows, "connection")
    if rhythm is not None and rhythm.confidence >= 0.999 and rhythm.found_share > 0.9 and len(rhythm.starts) >= 10:
        each_s = float(np.median(np.diff(rhythm.starts))) * streams.bin_ns / 1e9
        what = "small messages" if rhythm.volume < MIN_ITERATION_BYTES else "a sender limited to a rate"
        return f"even, {format_size(rhythm.volume)} every {format_duration(each_s)}: {what}"
    span = int(stream.bins[-1] - stream.bins[0]) + 1
    if len(stream.bins) >= 0.8 * span and span >= 100:
        return "without pauses"
    return "no rhythm"


def _repeats(stream: PayloadStream, rhythms: Mapping[PayloadStream, Periodicity], streams: Streams) -> str:
    each_s = float(np.median(np.diff(rhythms[stream].starts))) * streams.bin_ns / 1e9
    return f"{stream.name} repeats every {format_duration(each_s)}"


def _why_none(
    streams: Streams,
    rhythms: dict[PayloadStream, Periodicity | None],
    clear: dict[PayloadStream, Periodicity],
    lacking: Mapping[Training, str],
) -> str:
    """Describe the traffic of captures without training."""
    seconds = format_duration(streams.bins * streams.bin_ns / 1e9)
    top = streams.streams[0]
    share = f"{top.total / streams.total:.0%}"
    total = f"{format_size(streams.total)} of payload in {seconds}"
    if lacking:
        training = max(lacking, key=_weight)
        one_way = "it goes one way only, so it is a sender with pauses rather than training"
        repeats = _repeats(training.reference.stream, clear, streams)
        return f"{total}: {repeats}, but {lacking[training] or one_way}"
    what = describe(top, rhythms.get(top), streams)
    return (
        f"{total}, {share} of it {top.name} ({what}): no volume recurs with a silence each time, at least 4 times, as "
        "training's iterations do; a longer capture, or --bin 0.1ms for iterations below 20 ms, may show it"
    )
