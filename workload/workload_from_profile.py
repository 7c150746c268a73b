"""Makes workloads from recorded profiles: what the ranks of a job computed and sent in a typical iteration.

The profiler in the job writes a file per rank (agents/hook/ringtap_hook/layer_profiler.py). Its events divide an
iteration of the main thread into computations and communication. Communication that begins while the thread computes
on, such as DDP's buckets, waits for what was computed before, and what comes after its end waits for it.
"""

from __future__ import annotations

import io
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.core.clock_steps import CLOCK_STEP_NS
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.json_validation import COUNT, NS, Number, Shape, check, parse_json
from ringtap.core.run_directory_schema import PROFILE_RANGE, REGULAR_SHARE
from ringtap.core.units import counted
from ringtap.core.untrusted_files import open_regular
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.workload import CARRIED_OUT_AS, GROUP_DESCRIPTIONS, MAX_NODES, SPLITS, Workload, check_workload

_FILE = re.compile(r"rank(?P<rank>\d{1,7})-\d+(-\d+)?\.profile\.jsonl")
MAX_FILE_BYTES, MAX_RANKS = 2 << 30, 10_000_000
# Collectives of a backend's range that PyTorch names in its own way
_KINDS = {
    "all_reduce": Collective.ALL_REDUCE, "reduce": Collective.REDUCE, "broadcast": Collective.BROADCAST,
    "all_gather": Collective.ALL_GATHER, "_all_gather_base": Collective.ALL_GATHER, "gather": Collective.GATHER,
    "scatter": Collective.SCATTER, "reduce_scatter": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER, "all_to_all": Collective.ALL_TO_ALL,
    "barrier": Collective.BARRIER,
}  # fmt: skip
_KNOWN = {one.name.lower() for one in _KINDS.values()}
_PASSES = {"backward", "backward_end", "step", "stepped"}
_CALLS = {"call", "called", "wait", "waited"}
# Collectives that a communicator runs at a time: gloo has two threads, others a stream
_AT_A_TIME = {"gloo": 2}
# Kinds of calls that gloo carries out as others
CARRIED_OUT_BY_GLOO = {"reduce_scatter": "all_reduce"}
# Horovod sends together what is ready within a cycle
_CYCLE_NS = 1_000_000
# Waits that follow each other within this time are one
_AT_ONCE_NS = 100_000
_CLOCK_NS = 1_000_000  # by which readings of several clocks may differ


class Event(NamedTuple):
    """An event of a rank's main thread.

    Attributes:
        at_ns: its time.
        code: begin or end of a module, a pass, a call, a wait or an optimizer step, or a gradient that is ready.
        number: of the module, parameter, call or optimizer.
        signature: number of the signature of a call.
    """

    at_ns: int
    code: str
    number: int = -1
    signature: int = -1


class Range(NamedTuple):
    """A collective as PyTorch's profiler saw it.

    Attributes:
        backend: gloo, nccl ...
        kind: all_reduce ...; as PyTorch names it if it is not known.
        begin_ns: its begin.
        end_ns: its end.
        size_bytes: bytes of its inputs; None if not known.
    """

    backend: str
    kind: str
    begin_ns: int
    end_ns: int
    size_bytes: int | None


class Communication(NamedTuple):
    """A collective, a send or a receive in an iteration.

    Attributes:
        kind: as in the profile: all_reduce, send ...
        size_bytes: bytes, as Chakra counts them.
        ranks: its ranks.
        peer: the other rank of a message.
        tag: tag of a message.
        backend: gloo, nccl, horovod ...
        returns_at_once: True if its call does not wait for its end.
        splits: bytes to each rank, of an all-to-all that says them.
        carried_out_as: the kind that the backend carried out; empty if it is not known to be another one.
    """

    kind: str
    size_bytes: int
    ranks: tuple[int, ...]
    peer: int | None = None
    tag: int = 0
    backend: str = ""
    returns_at_once: bool = True
    splits: tuple[int, ...] = ()
    carried_out_as: str = ""


@dataclass(frozen=True)
class ProfiledIteration:
    """An iteration as it was recorded.

    Attributes:
        begin_ns: end of the iteration before.
        end_ns: its end.
        clock_ns: by how much the clock was set in it.
        events: its events in order.
        signatures: what calls communicate.
        ends_ns: number of a call -> end of its communication, where the range of it is not among those of the profile.
    """

    begin_ns: int
    end_ns: int
    clock_ns: int
    events: list[Event]
    signatures: list[Communication]
    ends_ns: dict[int, int] = field(default_factory=dict)


_SHAPES: dict[str, Shape] = {
    "model": {
        "version": int, "ranks": Number(1, MAX_RANKS, whole=True), "modules": [str], "device": str, "ddp": [[COUNT]],
        "batch": (COUNT, None),
        "parameters": [
            {"name": str, "shape": [COUNT], "elements": COUNT, "dtype": str, "element_bytes": COUNT,
             "needs_gradient": bool},
        ],
    },
    "iteration": {
        "begin_ns": NS, "end_ns": NS, "mono_ns": int, "real_ns": int, "events": [list], "signatures": [list],
    },
    "ranges": {"until_ns": NS, "ranges": [list]},
    "end": {"buckets": [[[COUNT]]]},
}  # fmt: skip


@dataclass
class _Item:
    """A part of an iteration: a computation, or communication that begins."""

    label: str  # name of a computation
    begin_ns: int  # begin, since the begin of the iteration
    length_ns: int | None  # length of a computation, or of communication if it is known
    communication: Communication | None = None  # None for a computation
    waits: tuple[int, ...] = ()  # places of the communication that a computation waits for
    is_async: bool = False  # True if the thread does not wait for this communication

    def key(self) -> tuple[Any, ...]:
        """Return what is alike in iterations that are; the bytes of an uneven all-to-all depend on the data."""
        communication = self.communication
        if communication is not None and communication.splits:
            communication = communication._replace(size_bytes=0, splits=())
        return self.label, communication, self.waits, self.is_async


@dataclass
class RankProfile:
    """The profile of a rank.

    Attributes:
        rank: its rank.
        path: its file.
        ranks: ranks of the job.
        parameters: name, shape, elements, dtype, element_bytes of each parameter tensor.
        modules: names of modules.
        device: device type of the parameters.
        ddp_ranks: ranks of the group of each DDP module.
        batch: first dimension of the model's first input, its samples; None if it is not known.
        buckets: numbers of the parameters of each of DDP's buckets, by DDP module.
        iterations: lines of the iterations.
        ranges: what PyTorch's profiler saw; None if it was not available, or the job was killed.
        ranges_until_ns: time at which that profiler ended.
        assumptions: what its iterations assume.
        advice: what to do if its iterations are not those of the job.
        descriptions: ranks of a group -> what frameworks call it.
    """

    rank: int
    path: Path
    ranks: int
    parameters: list[dict[str, Any]]
    modules: list[str]
    device: str
    ddp_ranks: list[list[int]]
    batch: int | None
    buckets: list[list[list[int]]] = field(default_factory=list)
    iterations: list[ProfiledIteration] = field(default_factory=list)
    ranges: list[Range] | None = None
    ranges_until_ns: int = 0
    assumptions: list[str] = field(default_factory=list)
    advice: str = "call ringtap.step() where yours end, and record the profile anew"
    descriptions: dict[tuple[int, ...], set[str]] = field(default_factory=dict)


def read_profiles(run: Path) -> list[RankProfile]:
    """Read the profiles of a run, one per rank.

    Raises:
        UsageError: there are none, one is missing, or one cannot be read.
    """
    files: dict[int, Path] = {}
    for path in sorted(run.glob("nodes/*/steps/*.profile.jsonl")):
        match = _FILE.fullmatch(path.name)
        if match:
            rank = int(match["rank"])
            if rank in files:
                raise UsageError(f"{run} has two profiles of rank {rank}, one of them {path.name}: record it anew")
            files[rank] = path
    if not files:
        raise UsageError(f"{run} has no profile: record one with ringtap run --profile -- COMMAND")
    found = [_read_profile(files[rank], rank) for rank in sorted(files)]
    ranks = max(one.ranks for one in found)
    missing = sorted(set(range(ranks)) - set(files))
    if missing:
        raise UsageError(f"{run} has profiles of {len(files)} of {ranks} ranks, and none of rank {missing[0]}")
    return found


def _read_profile(path: Path, rank: int) -> RankProfile:
    found = None
    for number, line in enumerate(_lines(path), 1):
        try:
            item = parse_json(line)
            check(item, {"kind": str})
            check(item, _SHAPES.get(item["kind"], {}))
            if item["kind"] == "model":
                if item["version"] != 1:
                    raise UsageError(f"{path} has version {item['version']}: update ringtap to read it")
                found = RankProfile(
                    rank, path, item["ranks"], item["parameters"], item["modules"], item["device"], item["ddp"],
                    item["batch"],
                )  # fmt: skip
            elif found is not None and item["kind"] == "iteration":
                found.iterations.append(_iteration(item))
            elif found is not None and item["kind"] == "ranges":
                found.ranges, found.ranges_until_ns = [_range(one) for one in item["ranges"]], item["until_ns"]
            elif found is not None and item["kind"] == "end":
                found.buckets = item["buckets"]
        except ValueError as error:
            raise UsageError(f"{path}, line {number} is damaged ({error}): record the profile anew") from error
    if found is None or not found.iterations:
        raise UsageError(f"{path} has no iteration: the job must run some iterations after the first three")
    if found.device != "cpu":
        raise UsageError(
            f"{path}: the job computed on {found.device}, of which the processes see only when work is handed over; "
            "use traces of torch.profiler (ringtap workload new --kineto)"
        )
    return found


def _iteration(item: dict[str, Any]) -> ProfiledIteration:
    events = []
    for at_ns, code, *numbers in item["events"]:
        check(at_ns, NS)
        check(code, str)
        check(numbers, [Number(-1, 2**53, whole=True)])
        # a call has its signature first
        events.append(Event(at_ns, code, *(numbers[1::-1] if code == "call" else numbers[:1])))
    signatures = []
    for one in item["signatures"]:
        kind, size_bytes, ranks, peer, tag, _, backend, returns_at_once, *more = one
        splits = more[0] if more else []
        check(one, [(str, int, bool, None, [COUNT])])
        check([size_bytes, *ranks, *splits], [COUNT])
        check([kind, backend, peer, tag], [(str, int, None)])
        signatures.append(
            Communication(
                kind, size_bytes, tuple(ranks), peer, int(tag), str(backend), bool(returns_at_once), tuple(splits)
            )
        )
    events.sort(key=lambda event: event.at_ns)
    clock_ns = abs(item["real_ns"] - item["mono_ns"])
    return ProfiledIteration(item["begin_ns"], item["end_ns"], clock_ns, events, signatures)


def _range(item: list[Any]) -> Range:
    check(dict(zip(PROFILE_RANGE, item, strict=True)), PROFILE_RANGE)
    name, begin_ns, length_ns, size_bytes = item
    backend, _, kind = name.partition(":")
    kind = _KINDS[kind].name.lower() if kind in _KINDS else kind
    return Range(backend, kind, begin_ns, begin_ns + length_ns, size_bytes)


def _lines(path: Path) -> Iterator[str]:
    """Yield the complete lines."""
    with file_errors(path):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has more than {MAX_FILE_BYTES >> 30} GiB, which is too much for a profile")
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line


def profile_workload(profiles: Sequence[RankProfile], name: str, ranks: int | None = None) -> Workload:
    """Return the workload of a typical iteration of profiled ranks.

    An iteration is typical if it has the computations and communication that most iterations have. Computations last
    the median of the typical iterations.

    Args:
        profiles: one per rank, in order.
        name: name of the run.
        ranks: ranks of the job, of which those without a profile do what the first one with a profile does; None: all
            have one.

    Raises:
        UsageError: a profile is damaged, or ranks differ in their communication.
    """
    ranks = len(profiles) if ranks is None else ranks
    every, durations = [], []
    assumptions: set[str] = set()
    groups: dict[tuple[int, ...], str] = {}
    for profile in profiles:
        assumptions.update(profile.assumptions)
        try:
            typical, times_s = _typical(profile, assumptions)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UsageError(f"{profile.path} is damaged: record the profile anew") from error
        durations.append(times_s)
        every.append(typical)
    first, cycles = profiles[0], _cycle_begins(every)
    used = min(zip(every, profiles, strict=True), key=lambda each: len(each[0]) / len(each[1].iterations))
    assumptions.update(_choice(len(used[0]), used[1]))
    traces = [_nodes(typical, cycles, ranks, groups) for typical in every]
    if len(profiles) < ranks:
        traces = _of_all_ranks(profiles, traces, ranks, has_groups=bool(groups))
        assumptions.add(f"{counted(ranks - len(profiles), 'rank')} without a trace: as rank {first.rank}")
    computation_s = [[sum(map(_computed_ns, items)) / 1e9 for items in typical] for typical in every]
    about: dict[str, Any] = {
        "profile_of": name, "workers": ranks, "batch": first.batch, "iterations": len(first.iterations),
        "typical_iterations": len(every[0]),
        "typical_share": round(len(used[0]) / len(used[1].iterations), 3),
        "iteration_s": statistics.median(durations[0]),
        "compute_s": statistics.median(time_s for times in computation_s for time_s in times),
        "variation": {
            "iteration": _variation(durations[0]),
            "computation": _variation(computation_s[0]),
            "communication": _variation([_communication_s(iteration) for iteration in every[0]]),
        },
        "parameters": [
            {key: one[key] for key in ("name", "shape", "elements", "dtype", "element_bytes")}
            for one in first.parameters
        ],
        "assumptions": sorted(assumptions),
    }  # fmt: skip
    described = {name: sorted({text for profile in profiles for text in profile.descriptions.get(members, ())})
                 for members, name in [*groups.items(), (tuple(range(ranks)), "")]}  # fmt: skip
    if any(described.values()):
        about[GROUP_DESCRIPTIONS] = {name: texts for name, texts in described.items() if texts}
    workload = Workload(traces, {name: list(ranks) for ranks, name in groups.items()}, about)
    check_workload(workload)
    return workload


def _choice(used: int, profile: RankProfile) -> list[str]:
    """Return which iterations of a profile are used and why, if not all are, as an assumption."""
    total = len(profile.iterations)
    if used == total:
        return []
    if used == 1:
        which = f"the first of {total} iterations of rank {profile.rank}"
        return [f"{which} is used alone, as no two compute and communicate alike"]
    which = f"{used} of {total} iterations of rank {profile.rank}"
    return [f"{which} are used, the most that compute and communicate alike"]


def _of_all_ranks(
    profiles: Sequence[RankProfile], traces: Sequence[list[Node]], ranks: int, *, has_groups: bool
) -> list[list[Node]]:
    is_message = any(node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV) for trace in traces for node in trace)
    if has_groups or is_message:
        what = "messages between two ranks" if is_message else "collectives of some ranks"
        raise UsageError(f"{profiles[0].path} has {what}, so that ranks differ: name the traces of all {ranks} ranks")
    if ranks * max(map(len, traces)) > MAX_NODES:
        raise UsageError(f"{profiles[0].path}: {ranks:,} ranks have more than {MAX_NODES:,} nodes, which are too many")
    known = {profile.rank: trace for profile, trace in zip(profiles, traces, strict=True)}
    return [known.get(rank, traces[0]) for rank in range(ranks)]


def _variation(values: Sequence[float | None]) -> float | None:
    """Standard deviation over mean; None if there are too few values, or not all are known."""
    known = [value for value in values if value is not None]
    if len(known) < max(2, len(values)) or not statistics.fmean(known):
        return None
    return round(statistics.stdev(known) / statistics.fmean(known), 5)


def _computed_ns(item: _Item) -> int:
    return (item.length_ns or 0) if item.communication is None else 0


def _communication_s(items: Sequence[_Item]) -> float | None:
    """Return the sum of the times of communication, None if not all are known."""
    lengths_ns = [item.length_ns for item in items if item.communication is not None]
    return None if None in lengths_ns else sum(length_ns or 0 for length_ns in lengths_ns) / 1e9


def _typical(profile: RankProfile, assumptions: set[str]) -> tuple[list[list[_Item]], list[float]]:
    """Return the iterations that are alike in the same way as most are, and their times, in s."""
    found, times_s = [], []
    ranges = sorted(profile.ranges or [], key=lambda one: one.begin_ns)
    steps = [Counter(one.number for one in each.events if one.code == "stepped") for each in profile.iterations]
    usual = Counter(tuple(sorted(each.values())) for each in steps).most_common(1)[0][1]
    if usual < REGULAR_SHARE * len(steps):
        raise UsageError(
            f"{profile.path}: other optimizers step between some steps of the first one and not between others, so its "
            f"steps are no iterations: {profile.advice}"
        )
    if profile.ranges is None and profile.ddp_ranks:
        raise UsageError(f"{profile.path} has no communication of DDP: the job was killed, or has an older PyTorch")
    for iteration in profile.iterations:
        is_seen = profile.ranges is None or iteration.end_ns <= profile.ranges_until_ns + _CLOCK_NS
        if iteration.clock_ns >= CLOCK_STEP_NS or not is_seen:
            continue
        within = [one for one in ranges if iteration.begin_ns <= one.begin_ns < iteration.end_ns]
        found.append(_Division(profile, iteration, within, assumptions).items())
        times_s.append((iteration.end_ns - iteration.begin_ns) / 1e9)
    if not found:
        raise UsageError(
            f"{profile.path} has no iteration to use: the clock was set in each, or the job's own profiler ran"
        )
    keys = [tuple(item.key() for item in items) for items in found]
    most = Counter(keys).most_common(1)[0][0]
    if not any(item.communication for item in found[keys.index(most)]):
        others = sum(any(item.communication for item in items) for items in found)
        if others or not most:
            raise UsageError(
                f"{profile.path} has communication in {others} of {counted(len(found), 'iteration')}, and most have "
                f"none: {profile.advice}"
            )
    chosen = [(items, time_s) for key, items, time_s in zip(keys, found, times_s, strict=True) if key == most]
    return [items for items, _ in chosen], [time_s for _, time_s in chosen]


class _Division:
    """The division of an iteration into computations and communication."""

    def __init__(
        self, profile: RankProfile, iteration: ProfiledIteration, ranges: Sequence[Range], assumptions: set[str]
    ) -> None:
        self._profile, self._iteration, self._assumptions = profile, iteration, assumptions
        self._now_ns = iteration.begin_ns
        self._items: list[_Item] = []
        self._waits: set[int] = set()  # of what comes next
        self._calls: dict[int, int] = {}  # number of a call -> place of its communication
        self._ends_ns: dict[int, int] = {}  # place of communication -> its end
        self._unwaited: set[int] = set()  # places of the communication whose end nothing has waited for
        self._state = "input"
        self._waited = {event.number for event in iteration.events if event.code == "waited"}
        self._range_of, self._launched = self._match(list(ranges))

    def _match(self, left: list[Range]) -> tuple[dict[int, Range], list[tuple[int, Range]]]:
        """Return the ranges of calls, and the others with the time at which they were handed to their backend."""
        events = self._iteration.events
        ends_ns = {event.number: event.at_ns for event in events if event.code == "called"}
        found: dict[int, Range] = {}
        for event in events:
            if event.code == "call" and event.number in ends_ns:
                one = self._range_of_call(event, ends_ns[event.number], left)
                if one is not None:
                    left.remove(one)
                    found[event.number] = one
        left = [one for one in left if one.kind in _KNOWN]
        begins_ns = self._bucket_begins(left) or [one.begin_ns for one in left]
        return found, list(zip(begins_ns, left, strict=True))

    def _range_of_call(self, event: Event, end_ns: int, ranges: Sequence[Range]) -> Range | None:
        """Return the range that a call made: the first of its kind, and of its bytes if there is one."""
        called = self._iteration.signatures[event.signature]
        latest_ns = (self._iteration.end_ns if called.returns_at_once else end_ns) + _CLOCK_NS
        kinds = called.kind, CARRIED_OUT_BY_GLOO.get(called.kind)
        alike = [one for one in ranges if event.at_ns - _CLOCK_NS <= one.begin_ns <= latest_ns and one.kind in kinds]
        return next((one for one in alike if one.size_bytes == called.size_bytes), alike[0] if alike else None)

    def _bucket_begins(self, ranges: Sequence[Range]) -> list[int]:
        """Return when DDP handed over each bucket, empty if these ranges are not its buckets.

        It does so when all gradients are ready and copied, one bucket after the other. If the backend is busy then, it
        begins later, and the time of copying is not known.
        """
        buckets = [bucket for module in self._profile.buckets for bucket in module]
        if len(buckets) != len(ranges) or len([module for module in self._profile.buckets if module]) != 1:
            return []
        events = self._iteration.events
        numbers = [number for number, one in enumerate(self._profile.parameters) if one["needs_gradient"]]
        ready_ns = {event.number: event.at_ns for event in events if event.code == "ready"}
        found, last_ns = [], 0
        for bucket, one in zip(buckets, ranges, strict=True):
            try:
                last_ns = max(last_ns, *(ready_ns[numbers[index]] for index in bucket))
            except LookupError:  # an iteration in which not all parameters took part
                return []
            next_ns = min((event.at_ns for event in events if event.at_ns > last_ns), default=last_ns)
            running = sum(other.begin_ns <= last_ns < other.end_ns for other in ranges)
            is_busy = running >= _AT_A_TIME.get(one.backend, 1)
            found.append(one.begin_ns if last_ns <= one.begin_ns < next_ns and not is_busy else last_ns + 1)
        return found

    def items(self) -> list[_Item]:
        steps: list[tuple[int, Event | Range]] = [(event.at_ns, event) for event in self._iteration.events]
        steps += self._launched
        is_leaf = False
        for at_ns, step in sorted(steps, key=lambda each: each[0]):
            if isinstance(step, Range):
                self._launch(at_ns, step)
                continue
            code = step.code
            if code == "enter" and self._state == "input":
                self._compute(at_ns, "input")
                self._state = "forward"
            elif code == "leave" and is_leaf:
                self._compute(at_ns, f"forward {self._profile.modules[step.number]}")
            elif code == "ready":
                self._compute(at_ns, f"backward {self._profile.parameters[step.number]['name']}")
            elif code in _PASSES:
                self._pass(at_ns, code)
            elif code in _CALLS:
                self._communication(at_ns, step)
            if code in ("enter", "leave"):
                is_leaf = code == "enter"
        if self._iteration.end_ns > self._now_ns or self._waits:
            self._compute(self._iteration.end_ns, self._state)
        return self._items

    def _pass(self, at_ns: int, code: str) -> None:
        """Go on to the backward pass, what follows it, or the optimizer."""
        if code == "backward":
            self._compute(at_ns, "loss" if self._state == "forward" else "forward")
            self._state = "backward"
        elif code == "backward_end":
            self._end_backward(at_ns)
        elif code == "stepped":
            self._compute(at_ns, "optimizer")
        else:
            self._compute(at_ns, self._state)
            never = {place for call, place in self._calls.items() if call not in self._waited} & self._unwaited
            if never:
                self._assumptions.add("the optimizer waits for communication for which no call waited")
            self._waits |= never
            self._unwaited -= never

    def _communication(self, at_ns: int, event: Event) -> None:
        """Begin or end a call, or a wait for one."""
        if event.code == "call":
            self._call(at_ns, event)
        elif event.code == "called":
            self._end_call(at_ns, event.number)
        elif event.code == "wait":
            self._compute(at_ns, self._state)
        else:
            if event.number in self._calls:
                self._waits.add(self._calls[event.number])
                self._unwaited.discard(self._calls[event.number])
            self._now_ns = at_ns

    def _compute(self, end_ns: int, label: str) -> None:
        """Add the computation since the last part."""
        length_ns = max(0, end_ns - self._now_ns)
        last = self._items[-1] if self._items else None
        if last is not None and last.communication is None and last.label == label and not self._waits:
            assert last.length_ns is not None
            last.length_ns += length_ns
        else:
            waits = tuple(sorted(self._waits))
            self._items.append(_Item(label, self._now_ns - self._iteration.begin_ns, length_ns, waits=waits))
        self._waits = set()
        self._now_ns = end_ns

    def _communicate(self, at_ns: int, communication: Communication, end_ns: int | None) -> int:
        """Add communication that begins, and return its place."""
        place = len(self._items)
        label = f"{communication.kind}{sum(item.communication is not None for item in self._items)}"
        length_ns = None if end_ns is None else end_ns - at_ns
        self._items.append(_Item(label, at_ns - self._iteration.begin_ns, length_ns, communication, is_async=True))
        if end_ns is not None:
            self._ends_ns[place] = end_ns
        return place

    def _launch(self, at_ns: int, one: Range) -> None:
        """Add communication that no Python code called, such as a bucket of DDP."""
        self._compute(at_ns, self._state)
        ranks = tuple(self._profile.ddp_ranks[0] if self._profile.ddp_ranks else range(self._profile.ranks))
        if not self._profile.ddp_ranks:
            self._assumptions.add("communication that no Python code called is of all ranks")
        if one.size_bytes is None:
            raise UsageError(f"{self._profile.path}: the bytes of a collective ({one.backend}:{one.kind}) are unknown")
        communication = Communication(one.kind, one.size_bytes, ranks, backend=one.backend)
        self._unwaited.add(self._communicate(at_ns, communication, one.end_ns))

    def _call(self, at_ns: int, event: Event) -> None:
        self._compute(at_ns, self._state)
        communication = self._iteration.signatures[event.signature]
        if len(set(communication.splits)) > 1:
            self._assumptions.add("bytes of uneven all-to-alls: those of the first iteration that is used")
        found = self._range_of.get(event.number)
        if found is not None:
            communication = communication._replace(backend=found.backend)
            if found.kind != communication.kind:
                communication = communication._replace(carried_out_as=found.kind)
                self._assumptions.add(f"{communication.kind} is carried out as {found.kind}, as {found.backend} did")
        end_ns = self._iteration.ends_ns.get(event.number) if found is None else found.end_ns
        place = self._communicate(at_ns, communication, end_ns)
        self._calls[event.number] = place
        self._items[place].is_async = communication.returns_at_once
        if communication.returns_at_once:
            self._unwaited.add(place)

    def _end_call(self, at_ns: int, number: int) -> None:
        place = self._calls.get(number)
        if place is None or self._items[place].is_async:
            return  # what it took to begin is a computation
        item = self._items[place]
        item.length_ns = at_ns - self._iteration.begin_ns - item.begin_ns
        self._now_ns = at_ns
        self._waits.add(place)

    def _end_backward(self, at_ns: int) -> None:
        """Add what follows the end of the communication that the backward pass waits for."""
        mine = self._unwaited - set(self._calls.values())
        if mine:
            self._now_ns = min(at_ns, max(self._now_ns, *(self._ends_ns[place] for place in mine)))
            self._waits |= mine
            self._unwaited -= mine
        self._compute(at_ns, "backward")
        self._state = "between"


def _nodes(
    typical: Sequence[Sequence[_Item]], cycles: Sequence[bool], ranks: int, groups: dict[tuple[int, ...], str]
) -> list[Node]:
    """Return the nodes of a rank, with the median times of its typical iterations."""
    items = _fused(typical, cycles)
    nodes: list[Node] = []
    ids: dict[int, int] = {}  # place -> node
    running: dict[tuple[tuple[int, ...], str], list[int]] = defaultdict(list)
    before, computed_ns = 0, 0
    for place, item in enumerate(items):
        if item is None:
            continue
        after = [before] if before else []
        after += [ids[wait] for wait in item.waits]
        number = len(nodes) + 1
        node = Node(number, item.label, NodeType.COMP, after, start_us=item.begin_ns // 1000)
        node.attributes["is_cpu_op"] = False
        found = item.communication
        if found is None:
            assert item.length_ns is not None
            # rounded in sum, so that many short computations keep their length
            node.duration_us = (computed_ns + item.length_ns + 500) // 1000 - (computed_ns + 500) // 1000
            computed_ns += item.length_ns
            before = number
        else:
            if found.kind in ("send", "recv"):
                _describe_message(node, found)
            else:
                _describe_collective(node, found, ranks, groups)
                chain = running[found.ranks, found.backend]
                at_a_time = _AT_A_TIME.get(found.backend, 1)
                if len(chain) >= at_a_time:
                    node.control_deps = sorted({*after, chain[-at_a_time]})
                chain.append(number)
            ids[place] = number
            before = before if item.is_async else number
        nodes.append(node)
    return nodes


def _describe_message(node: Node, found: Communication) -> None:
    if found.peer is None:
        raise UsageError("a receive from any rank cannot become part of a workload: name the source in the job")
    node.type = NodeType.COMM_SEND if found.kind == "send" else NodeType.COMM_RECV
    peer = "comm_dst" if found.kind == "send" else "comm_src"
    node.attributes |= {peer: found.peer, "comm_tag": found.tag, "comm_size": found.size_bytes}


def _describe_collective(node: Node, found: Communication, ranks: int, groups: dict[tuple[int, ...], str]) -> None:
    node.type = NodeType.COMM_COLL
    node.attributes |= {"comm_type": int(Collective[found.kind.upper()]), "comm_size": found.size_bytes}
    if found.carried_out_as:
        node.attributes[CARRIED_OUT_AS] = int(Collective[found.carried_out_as.upper()])
    if len(set(found.splits)) > 1:
        node.attributes[SPLITS] = list(found.splits)
    if found.ranks != tuple(range(ranks)):
        node.attributes["pg_name"] = groups.setdefault(found.ranks, str(len(groups) + 1))


def _cycle_begins(every: Sequence[Sequence[Sequence[_Item]]]) -> list[bool]:
    """Return for each of Horovod's tensors whether it begins a cycle, on all ranks alike: Horovod decides for all."""
    ranks: list[list[tuple[int, str, bool]]] = []  # begin, kind, True if something else came between
    for typical in every:
        tensors, is_apart = [], True
        for alike in zip(*typical, strict=True):
            found = alike[0].communication
            if found is not None and found.backend == "horovod":
                begin_ns = round(statistics.median(one.begin_ns for one in alike))
                tensors.append((begin_ns, found.kind, is_apart))
                is_apart = False
            elif found is not None or alike[0].waits:
                is_apart = True
        ranks.append(tensors)
    begins: list[bool] = []
    first = 0  # of the cycle
    for place, alike in enumerate(zip(*ranks, strict=False)):
        is_new = any(
            is_apart or kind == "all_to_all" or kind != tensors[first][1] or begin_ns - tensors[first][0] > _CYCLE_NS
            for (begin_ns, kind, is_apart), tensors in zip(alike, ranks, strict=True)
        )
        first = place if is_new else first
        begins.append(is_new)
    return begins


def _fused(typical: Sequence[Sequence[_Item]], cycles: Sequence[bool]) -> list[_Item | None]:
    """Return the items with their median times, and Horovod's tensors of a cycle as one; None where one was joined."""
    items: list[_Item | None] = []
    computed = [list(accumulate(_computed_ns(item) for item in iteration)) for iteration in typical]
    computed_ns = 0
    into: dict[int, int] = {}  # place of a tensor -> place of the fused one
    begins = iter(cycles)
    open_place = -1
    for place, alike in enumerate(zip(*typical, strict=True)):
        item = replace(alike[0], begin_ns=round(statistics.median(one.begin_ns for one in alike)), length_ns=None)
        if item.communication is None:
            # the medians of all computation so far, not those of single ones, add up to the median iteration
            until_ns = max(computed_ns, round(statistics.median(sums[place] for sums in computed)))
            item.length_ns, computed_ns = until_ns - computed_ns, until_ns
        items.append(item)
        found = item.communication
        if found is None or found.backend != "horovod":
            continue
        if not next(begins, True):
            last = items[open_place]
            assert last is not None
            assert last.communication is not None
            item.communication = found._replace(size_bytes=last.communication.size_bytes + found.size_bytes)
            into |= {one: place for one, other in into.items() if other == open_place}
            into[open_place] = place
            items[open_place] = None
        open_place = place
    for item in items:
        if item is not None:
            item.waits = tuple(sorted({into.get(wait, wait) for wait in item.waits}))
    return _joined(items)


def _joined(items: Sequence[_Item | None]) -> list[_Item | None]:
    """Return items in which waits that follow each other at once are one."""
    found: list[_Item | None] = []
    last = None  # the computation that ends where the next item begins
    for item in items:
        found.append(item)
        if item is None:
            continue
        if item.communication is not None:
            last = None
        elif last is not None and last.waits and last.label == item.label and (last.length_ns or 0) < _AT_ONCE_NS:
            last.length_ns = (last.length_ns or 0) + (item.length_ns or 0)
            last.waits = tuple(sorted({*last.waits, *item.waits}))
            found[-1] = None
        else:
            last = item
    return found
