"""Workloads of recorded profiles: what the ranks of a job computed and communicated in a typical iteration.

The profiler in the job writes a file per rank (agents/hook/ringtap_hook/profile.py). Its events divide an iteration of
the main thread into computations and communication. Communication that begins while the thread computes on, such as
DDP's buckets, waits for what was computed before, and what comes after its end waits for it.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.units import counted
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.workload import Workload, check_workload

_FILE = re.compile(r"rank(?P<rank>\d{1,7})-\d+(-\d+)?\.profile\.jsonl")
MAX_FILE_BYTES = 2 << 30
# Collectives of a backend's range that PyTorch names in its own way
_KINDS = {
    "all_reduce": Collective.ALL_REDUCE, "reduce": Collective.REDUCE, "broadcast": Collective.BROADCAST,
    "all_gather": Collective.ALL_GATHER, "_all_gather_base": Collective.ALL_GATHER, "gather": Collective.GATHER,
    "scatter": Collective.SCATTER, "reduce_scatter": Collective.REDUCE_SCATTER,
    "_reduce_scatter_base": Collective.REDUCE_SCATTER, "all_to_all": Collective.ALL_TO_ALL,
    "barrier": Collective.BARRIER,
}  # fmt: skip
# Collectives that a communicator runs at a time: gloo has two threads, others a stream
_AT_A_TIME = {"gloo": 2}
# Kinds of calls that gloo carries out as others
_CARRIED_OUT_AS = {"reduce_scatter": "all_reduce"}
# Horovod sends together what is ready within a cycle
_CYCLE_NS = 1_000_000
# Waits that follow each other within this time are one
_AT_ONCE_NS = 100_000
_CLOCK_NS = 1_000_000  # by which clocks may differ


@dataclass
class _Communication:
    """A collective, a send or a receive in an iteration.

    Attributes:
        kind: as in the profile: all_reduce, send ...
        size_bytes: bytes, as Chakra counts them.
        ranks: its ranks.
        peer: the other rank of a message.
        tag: tag of a message.
        backend: gloo, nccl, horovod ...
    """

    kind: str
    size_bytes: int
    ranks: tuple[int, ...]
    peer: int | None = None
    tag: int = 0
    backend: str = ""

    def key(self) -> tuple[Any, ...]:
        return self.kind, self.size_bytes, self.ranks, self.peer, self.tag


@dataclass
class _Item:
    """A part of an iteration: a computation, or communication that begins.

    Attributes:
        label: name of a computation.
        begin_ns: begin, since the begin of the iteration.
        length_ns: length of a computation, or of communication if it is known.
        communication: None for a computation.
        waits: places of the communication that a computation waits for.
        is_async: True if the thread does not wait for this communication.
    """

    label: str
    begin_ns: int
    length_ns: int | None
    communication: _Communication | None = None
    waits: tuple[int, ...] = ()
    is_async: bool = False

    def key(self) -> tuple[Any, ...]:
        found = None if self.communication is None else self.communication.key()
        return self.label, found, self.waits, self.is_async


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
        ranges: name, begin and length in ns, and bytes of what PyTorch's profiler saw.
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
    iterations: list[dict[str, Any]] = field(default_factory=list)
    ranges: list[list[Any]] | None = None

    def ready_order(self, iteration: int = -1) -> list[int]:
        """Numbers of the parameters in the order in which their gradients became ready."""
        return [event[2] for event in self.iterations[iteration]["events"] if event[1] == "ready"]


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
                raise UsageError(f"{run} has two profiles of rank {rank} ({files[rank].name}, {path.name}): record anew")
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
            item = json.loads(line)
            kind = item["kind"]
            if kind == "model":
                if item["version"] != 1:
                    raise UsageError(f"{path} has version {item['version']}: update ringtap to read it")
                found = RankProfile(
                    rank, path, int(item["ranks"]), list(item["parameters"]), list(item["modules"]), item["device"],
                    list(item["ddp"]), item["batch"],
                )  # fmt: skip
            elif found is not None and kind == "iteration":
                found.iterations.append(item)
            elif found is not None and kind == "ranges":
                found.ranges = list(item["ranges"])
            elif found is not None and kind == "end":
                found.buckets = list(item["buckets"])
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise UsageError(f"{path}, line {number} is damaged: record the profile anew") from error
    if found is None or not found.iterations:
        raise UsageError(f"{path} has no iteration: the job must run some iterations after the first three")
    if found.device != "cpu":
        raise UsageError(
            f"{path}: the job computed on {found.device}, of which the processes see only when work is handed over; "
            "use a trace of PyTorch's profiler"
        )
    return found


def _lines(path: Path) -> Iterator[str]:
    """Yield the complete lines."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has more than {MAX_FILE_BYTES >> 30} GiB, which is too much for a profile")
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def profile_workload(profiles: Sequence[RankProfile], name: str) -> Workload:
    """Return the workload of a typical iteration of profiled ranks.

    An iteration is typical if it has the computations and communication that most iterations have. Computations last
    the median of the typical iterations.

    Args:
        profiles: one per rank, in order.
        name: name of the run.

    Raises:
        UsageError: a profile is damaged, or ranks differ in their communication.
    """
    traces, assumptions, durations, shares = [], set(), [], []
    groups: dict[tuple[int, ...], str] = {}
    measured: dict[str, list[float]] = defaultdict(list)
    for profile in profiles:
        try:
            typical, times_s = _typical(profile, assumptions)
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise UsageError(f"{profile.path} is damaged: record the profile anew") from error
        durations.append(times_s)
        shares.append(len(typical) / len(profile.iterations))
        traces.append(_nodes(typical, len(profiles), groups))
        for iteration in typical:
            measured["computation_s"].append(_total_s(iteration, of_computation=True))
            measured["communication_s"].append(_total_s(iteration, of_computation=False))
    first = profiles[0]
    about: dict[str, Any] = {
        "profile_of": name, "workers": len(profiles), "batch": first.batch, "iterations": len(first.iterations),
        "typical_share": round(min(shares), 3),
        "iteration_s": statistics.median(durations[0]),
        "compute_s": statistics.median(measured["computation_s"]),
        "variation": {
            "iteration": _variation([time_s for times in durations for time_s in times]),
            "computation": _variation(measured["computation_s"]),
            "communication": _variation(measured["communication_s"]),
        },
        "parameters": [
            {key: one[key] for key in ("name", "shape", "elements", "dtype", "element_bytes")}
            for one in first.parameters
        ],
        "assumptions": sorted(assumptions),
    }  # fmt: skip
    workload = Workload(traces, {name: list(ranks) for ranks, name in groups.items()}, about)
    check_workload(workload)
    return workload


def _variation(values: Sequence[float]) -> float | None:
    """Standard deviation over mean; None if there are too few values."""
    if len(values) < 2 or not statistics.fmean(values):
        return None
    return round(statistics.stdev(values) / statistics.fmean(values), 5)


def _computed_ns(item: _Item) -> int:
    return (item.length_ns or 0) if item.communication is None else 0


def _total_s(items: Sequence[_Item], *, of_computation: bool) -> float:
    chosen = [item for item in items if (item.communication is None) == of_computation]
    return sum(item.length_ns or 0 for item in chosen) / 1e9


def _typical(profile: RankProfile, assumptions: set[str]) -> tuple[list[list[_Item]], list[float]]:
    """Return the iterations that are alike in the same way as most are, and the times of all, in s."""
    found, times_s = [], []
    ranges = sorted(profile.ranges or [], key=lambda item: int(item[1]))
    if profile.ranges is None and profile.ddp_ranks:
        raise UsageError(
            f"{profile.path} has no communication of DDP: let the job run {counted(len(profile.iterations) + 1, 'more iteration')} "
            "and use no other profiler in it"
        )
    for line in profile.iterations:
        begin_ns, end_ns = int(line["begin_ns"]), int(line["end_ns"])
        if abs(int(line["real_ns"]) - int(line["mono_ns"])) > _CLOCK_NS:
            continue  # the clock was set
        within = [item for item in ranges if begin_ns <= int(item[1]) < end_ns]
        found.append(_Iteration(profile, line, within, assumptions).items())
        times_s.append((end_ns - begin_ns) / 1e9)
    if not found:
        raise UsageError(f"{profile.path}: the clock was set during every iteration: record the profile anew")
    keys = [tuple(item.key() for item in items) for items in found]
    most = Counter(keys).most_common(1)[0][0]
    return [items for key, items in zip(keys, found, strict=True) if key == most], times_s


def _kind_of(item: list[Any]) -> str:
    """Return the kind of a range's communication."""
    kind = str(item[0]).partition(":")[2]
    return _KINDS[kind].name.lower() if kind in _KINDS else kind


class _Iteration:
    """An iteration of a rank, divided into computations and communication."""

    def __init__(
        self, profile: RankProfile, line: dict[str, Any], ranges: Sequence[list[Any]], assumptions: set[str]
    ) -> None:
        self._profile, self._line, self._assumptions = profile, line, assumptions
        self._begin_ns = self._now_ns = int(line["begin_ns"])
        self._items: list[_Item] = []
        self._waits: set[int] = set()  # of what comes next
        self._calls: dict[int, int] = {}  # number of a call -> place of its communication
        self._ends_ns: dict[int, int] = {}  # place of communication -> its end
        self._unwaited: set[int] = set()  # places of the communication that the backward pass waits for
        self._state = "input"
        self._events = self._merged(ranges)
        self._waited = {event[2] for event in self._events if event[1] == "waited"}

    def _merged(self, ranges: Sequence[list[Any]]) -> list[list[Any]]:
        """Return all events in order, with the begin of communication that no Python code called."""
        events = sorted(self._line["events"], key=lambda event: int(event[0]))
        ends_ns = {event[2]: int(event[0]) for event in events if event[1] == "called"}
        self._range_of: dict[int, list[Any]] = {}
        left = list(ranges)
        for event in events:
            if event[1] == "call" and event[3] in ends_ns:
                item = self._range_of_call(event, ends_ns[event[3]], left)
                if item is not None:
                    left.remove(item)
                    self._range_of[event[3]] = item
        left = [item for item in left if str(item[0]).partition(":")[2] in _KINDS]
        begins_ns = self._bucket_begins(events, left) or [int(item[1]) for item in left]
        launched = [[begin_ns, "launched", item] for begin_ns, item in zip(begins_ns, left, strict=True)]
        return sorted([*events, *launched], key=lambda event: int(event[0]))

    def _range_of_call(self, begin: list[Any], end_ns: int, ranges: Sequence[list[Any]]) -> list[Any] | None:
        """Return the range that a call made: the first of its kind, and of its bytes if there is one."""
        called, size_bytes, *_, returns_at_once = self._line["signatures"][begin[2]]
        latest_ns = int(self._line["end_ns"] if returns_at_once else end_ns) + _CLOCK_NS
        wanted = called, _CARRIED_OUT_AS.get(called)
        alike = [item for item in ranges if int(begin[0]) - _CLOCK_NS <= int(item[1]) <= latest_ns
                 and _kind_of(item) in wanted]  # fmt: skip
        found = next((item for item in alike if item[3] == size_bytes), alike[0] if alike else None)
        if found is not None and _kind_of(found) != called:
            self._assumptions.add(f"{called}, as called; the backend carried it out as {_kind_of(found)}")
        return found

    def _bucket_begins(self, events: Sequence[list[Any]], ranges: Sequence[list[Any]]) -> list[int]:
        """Return when DDP handed over each bucket, empty if these ranges are not its buckets.

        It does so when all gradients are ready and copied, one bucket after the other. If the backend is busy then, it
        begins later, and the time of copying is not known.
        """
        buckets = [bucket for module in self._profile.buckets for bucket in module]
        if len(buckets) != len(ranges) or len([module for module in self._profile.buckets if module]) != 1:
            return []
        numbers = [number for number, one in enumerate(self._profile.parameters) if one["needs_gradient"]]
        ready_ns = {event[2]: int(event[0]) for event in events if event[1] == "ready"}
        found, last_ns = [], 0
        for bucket, item in zip(buckets, ranges, strict=True):
            try:
                last_ns = max(last_ns, *(ready_ns[numbers[index]] for index in bucket))
            except LookupError:  # gradients of an iteration in which not all parameters took part
                return []
            next_ns = min((int(event[0]) for event in events if int(event[0]) > last_ns), default=last_ns)
            running = sum(int(one[1]) <= last_ns < int(one[1]) + int(one[2]) for one in ranges)
            is_busy = running >= _AT_A_TIME.get(str(item[0]).partition(":")[0], 1)
            found.append(int(item[1]) if last_ns <= int(item[1]) < next_ns and not is_busy else last_ns + 1)
        return found

    def items(self) -> list[_Item]:
        """Return its parts in order."""
        depth: list[int] = []
        has_entered = False
        for event in self._events:
            at_ns, code = int(event[0]), event[1]
            if code == "enter":
                depth.append(event[2])
                has_entered = True
                if self._state == "input":
                    self._compute(at_ns, "input")
                    self._state = "forward"
            elif code == "leave":
                if has_entered:  # a module without others in it
                    self._compute(at_ns, f"forward {self._profile.modules[event[2]]}")
                has_entered = False
                if depth:
                    depth.pop()
            elif code == "backward":
                self._compute(at_ns, "loss" if self._state == "forward" else "forward")
                self._state = "backward"
            elif code == "ready":
                self._compute(at_ns, f"backward {self._profile.parameters[event[2]]['name']}")
            elif code == "backward_end":
                self._end_backward(at_ns)
            elif code == "launched":
                self._launch(at_ns, event)
            elif code == "call":
                self._call(at_ns, event)
            elif code == "called":
                self._end_call(at_ns, event[2])
            elif code == "wait":
                self._compute(at_ns, self._state)
            elif code == "waited":
                if event[2] in self._calls:
                    self._waits.add(self._calls[event[2]])
                    self._unwaited.discard(self._calls[event[2]])
                self._now_ns = at_ns
            elif code == "step":
                self._compute(at_ns, self._state)
                never = {place for call, place in self._calls.items() if call not in self._waited} & self._unwaited
                if never:
                    self._assumptions.add("the optimizer waits for communication for which no call waited")
                self._waits |= never
                self._unwaited -= never
            elif code == "stepped":
                self._compute(at_ns, "optimizer")
        end_ns = int(self._line["end_ns"])
        if end_ns > self._now_ns or self._waits:
            self._compute(end_ns, self._state)
        return self._items

    def _compute(self, end_ns: int, label: str) -> None:
        """Add the computation since the last part."""
        length_ns = max(0, end_ns - self._now_ns)
        last = self._items[-1] if self._items else None
        if last is not None and last.communication is None and last.label == label and not self._waits:
            assert last.length_ns is not None
            last.length_ns += length_ns
        else:
            waits = tuple(sorted(self._waits))
            self._items.append(_Item(label, self._now_ns - self._begin_ns, length_ns, waits=waits))
        self._waits = set()
        self._now_ns = end_ns

    def _communicate(self, at_ns: int, communication: _Communication, end_ns: int | None) -> int:
        """Add communication that begins, and return its place."""
        place = len(self._items)
        label = f"{communication.kind}{sum(item.communication is not None for item in self._items)}"
        length_ns = None if end_ns is None else end_ns - at_ns
        self._items.append(_Item(label, at_ns - self._begin_ns, length_ns, communication, is_async=True))
        if end_ns is not None:
            self._ends_ns[place] = end_ns
        return place

    def _launch(self, at_ns: int, event: list[Any]) -> None:
        """Add communication that no Python code called, such as a bucket of DDP."""
        name, begin_ns, length_ns, size_bytes = event[2]
        backend, _, kind = str(name).partition(":")
        self._compute(at_ns, self._state)
        ranks = tuple(self._profile.ddp_ranks[0] if self._profile.ddp_ranks else range(self._profile.ranks))
        if not self._profile.ddp_ranks:
            self._assumptions.add("communication that no Python code called is of all ranks")
        if size_bytes is None:
            raise UsageError(f"{self._profile.path}: the bytes of a collective ({backend}:{kind}) are unknown")
        communication = _Communication(_KINDS[kind].name.lower(), int(size_bytes), ranks, backend=backend)
        self._unwaited.add(self._communicate(at_ns, communication, int(begin_ns) + int(length_ns)))

    def _call(self, at_ns: int, event: list[Any]) -> None:
        kind, size_bytes, ranks, peer, tag, _, _, backend, returns_at_once = self._line["signatures"][event[2]]
        number = event[3]
        self._compute(at_ns, self._state)
        found = self._range_of.get(number)
        backend = str(found[0]).partition(":")[0] if found else backend
        end_ns = int(found[1]) + int(found[2]) if found else None
        communication = _Communication(kind, int(size_bytes), tuple(ranks), peer, int(tag), backend)
        place = self._communicate(at_ns, communication, end_ns)
        self._calls[number] = place
        self._items[place].is_async = bool(returns_at_once)
        if returns_at_once:
            self._unwaited.add(place)

    def _end_call(self, at_ns: int, number: int) -> None:
        place = self._calls[number]
        item = self._items[place]
        if item.is_async:
            return  # what it took to begin is a computation
        item.length_ns = at_ns - self._begin_ns - item.begin_ns
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


def _nodes(typical: Sequence[Sequence[_Item]], ranks: int, groups: dict[tuple[int, ...], str]) -> list[Node]:
    """Return the nodes of a rank, with the median times of its typical iterations."""
    items = _fused(typical)
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


def _describe_message(node: Node, found: _Communication) -> None:
    if found.peer is None:
        raise UsageError("a receive from any rank cannot become part of a workload: name the source in the job")
    node.type = NodeType.COMM_SEND if found.kind == "send" else NodeType.COMM_RECV
    peer = "comm_dst" if found.kind == "send" else "comm_src"
    node.attributes |= {peer: found.peer, "comm_tag": found.tag, "comm_size": found.size_bytes}


def _describe_collective(node: Node, found: _Communication, ranks: int, groups: dict[tuple[int, ...], str]) -> None:
    node.type = NodeType.COMM_COLL
    node.attributes |= {"comm_type": int(Collective[found.kind.upper()]), "comm_size": found.size_bytes}
    if found.ranks != tuple(range(ranks)):
        node.attributes["pg_name"] = groups.setdefault(found.ranks, str(len(groups) + 1))


def _fused(typical: Sequence[Sequence[_Item]]) -> list[_Item | None]:
    """Return the items with their median times, and Horovod's tensors of a cycle as one; None where one was joined."""
    items: list[_Item | None] = []
    computed = [list(accumulate(_computed_ns(item) for item in iteration)) for iteration in typical]
    computed_ns = 0
    into: dict[int, int] = {}  # place of a tensor -> place of the fused one
    open_place, open_ns = None, 0
    for place, alike in enumerate(zip(*typical, strict=True)):
        item = replace(alike[0], begin_ns=round(statistics.median(one.begin_ns for one in alike)), length_ns=None)
        if item.communication is None:
            # the medians of all computation so far, not those of single ones, add up to the median iteration
            until_ns = max(computed_ns, round(statistics.median(sums[place] for sums in computed)))
            item.length_ns, computed_ns = until_ns - computed_ns, until_ns
        items.append(item)
        found = item.communication
        if found is None or found.backend != "horovod":
            open_place = open_place if found is None and not item.waits else None
            continue
        last = None if open_place is None else items[open_place]
        if last is not None and last.communication is not None and item.begin_ns - open_ns <= _CYCLE_NS and (
            last.communication.kind == found.kind
        ):
            total = last.communication.size_bytes + found.size_bytes
            item.communication = replace(found, size_bytes=total)
            into |= {one: place for one, other in into.items() if other == open_place}
            into[open_place] = place
            items[open_place] = None
        else:
            open_ns = item.begin_ns
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
