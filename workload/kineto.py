"""Makes workloads from Kineto traces, the files that torch.profiler exports in Chrome's trace event format.

With GPUs, computation is what their streams run beside NCCL's kernels, in the order in which the host launched it.
Without, it is what the thread of the training loop does, and gloo's ranges say when its collectives ran. PyTorch's
execution traces add the shapes of inputs to a trace that was recorded without them.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.core.errors import UsageError
from ringtap.core.json_validation import COUNT, Number, Shape, ShapeError, check
from ringtap.core.large_json import members
from ringtap.core.run_directory_schema import FORMER_CATEGORIES, GPU_CATEGORIES
from ringtap.core.units import counted
from ringtap.workload.execution_trace import Collective
from ringtap.workload.workload_from_profile import (
    CARRIED_OUT_BY_GLOO,
    Communication,
    Event,
    ProfiledIteration,
    RankProfile,
)

MAX_EVENTS = 20_000_000
_MAX_DIMENSIONS = 64  # of a tensor in PyTorch
# kinds by how PyTorch's names begin: allreduce_, _allgather_base, reduce_scatter_tensor_coalesced, all_to_allv ...
_KINDS = {one.name.replace("_", "").lower(): one.name.lower() for one in sorted(Collective, key=lambda one: -one)}
_KINDS |= {"send": "send", "recv": "recv"}
_ELEMENT_BYTES = {
    "bool": 1, "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "short": 2, "half": 2, "bfloat16": 2,
    "int": 4, "float": 4, "long": 8, "long int": 8, "double": 8, "complexfloat": 8, "complex<float>": 8,
    "complexdouble": 16, "complex<double>": 16,
}  # fmt: skip
# Ranges of collectives begin with the name of their backend. RCCL's are NCCL's; nccl2, NCCLX and other backends of
# torchcomms have none, but kernels of NCCL and parameters.
_RANGES, _UNREAD_RANGES = ("nccl:", "gloo:"), ("xccl:", "ucc:", "mpi:")
_PARAMETERS = "record_param_comms"  # name of the operations that have the parameters of a collective
# A thread that runs no operation for this long until a collective ends has waited for it
WAIT_S = 1e-4
_US = Number(0, 2**62)
_TAG = Number(0, 2**31 - 1, whole=True)
_EVENT: Shape = {"name": str, "cat": str, "ts": _US, "dur": _US, "args?": dict}
MAX_JOB_RANKS = 100_000
_RANK = Number(0, MAX_JOB_RANKS, whole=True)
_INFO: Shape = {"rank?": _RANK, "world_size?": replace(_RANK, minimum=1), "pg_config?": [dict]}
_GROUP = ("Process Group Name", "Group size", "Process Group Ranks")
_FILES = ("*.json", "*.json.gz")
_OTHER_DEVICES = {"hpu_op", "mtia_ccp_events"}  # categories of what accelerators run whose collectives are not NCCL's
_ASSUMED_OF_GPUS = (
    "a collective waits for the kernels launched before it, unless it began before they ended",
    "the kernel after a wait of a stream, and the first of an optimizer step, wait for the collectives that have ended",
)
_BEGIN_OF_MANY = "the first iteration of a trace is not used, as it does not say when the GPU ended the one before"
_BEGIN_OF_ONE = "a trace of one iteration has no time between the end of the GPU's work before and its own begin"
_ASSUMED_OF_CPUS = (
    f"a thread that runs nothing for {1e3 * WAIT_S:g} ms until a collective ends waits for it",
    "an optimizer step waits for the collectives that have ended before it",
    "the thread of the training loop computes while it does not wait",
)


class _Span(NamedTuple):
    """An event of a trace, in a thread of a process; times in us."""

    begin: float
    end: float
    name: str
    thread: Any
    args: dict[str, Any]


class _Kernel(NamedTuple):
    """A computation or a copy of a GPU; times in us."""

    begin: float
    end: float
    thread: Any  # its GPU and stream
    correlation: str  # number of its launch


class _Call(NamedTuple):
    """A collective, a send or a receive of an iteration; times in us."""

    launched: float  # time of its call
    begin: float
    end: float
    communication: Communication  # kind, bytes and ranks
    returned: float  # time at which its call returned, without what it waited for


@dataclass
class _Trace:
    """Content of a Kineto file of a rank; times in us."""

    path: Path
    shapes: dict[int, tuple[str, dict[str, Any]]]  # inputs of operations by id, of an execution trace
    info: dict[str, Any] = field(default_factory=dict)  # rank, number of ranks, and groups
    steps: list[_Span] = field(default_factory=list)  # annotations of iterations
    optimizers: list[_Span] = field(default_factory=list)  # annotations of optimizer steps
    kernels: list[_Kernel] = field(default_factory=list)  # what GPUs compute and copy
    collectives: list[_Span] = field(default_factory=list)  # NCCL's kernels
    threads: dict[Any, Any] = field(default_factory=dict)  # process and thread of events, each once in memory
    streams: set[Any] = field(default_factory=set)  # those of what GPUs run, which are a GPU and its stream
    earlier_end: float = -math.inf  # end of what GPUs ran that had been launched before the trace began
    launches: dict[Any, tuple[float, Any]] = field(default_factory=dict)  # correlation -> time and thread of a launch
    waits: list[tuple[float, Any]] = field(default_factory=list)  # time and thread of each call that lets a stream wait
    ranges: list[_Span] = field(default_factory=list)  # what NCCL and gloo annotate
    parameters: list[_Span] = field(default_factory=list)  # operations with the parameters of collectives
    calls: list[_Span] = field(default_factory=list)  # operations of torch.distributed
    # thread -> begins and ends of operations
    operations: dict[Any, tuple[array[float], array[float]]] = field(
        default_factory=lambda: defaultdict(lambda: (array("d"), array("d")))
    )
    backward: array[float] = field(default_factory=lambda: array("d"))  # begins of operations of the backward pass
    unread: set[str] = field(default_factory=set)  # backends whose collectives are not read
    left_out: list[float] = field(default_factory=list)  # times of calls that no range of gloo carried out
    # ranks of a group -> what frameworks call it
    descriptions: dict[tuple[int, ...], set[str]] = field(default_factory=lambda: defaultdict(set))
    # what collectives say of their groups -> the ranks
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, event: Any) -> None:
        check(event, {"ph": str})
        if event["ph"] != "X" or event.get("cat") == "Trace":
            return
        check(event, _EVENT)
        name, kind, args = event["name"], event["cat"], event.get("args", {})
        kind = FORMER_CATEGORIES.get(kind, kind)
        thread, begin = (str(event.get("pid")), str(event.get("tid"))), event["ts"]
        thread = self.threads.setdefault(thread, thread)
        span = _Span(begin, begin + event["dur"], name, thread, args)
        if kind in GPU_CATEGORIES or kind in _OTHER_DEVICES:
            self._add_of_device(span, kind)
        elif kind in ("cuda_runtime", "cuda_driver"):
            if name.endswith("StreamWaitEvent"):
                self.waits.append((begin, thread))
            elif "Launch" in name or "Mem" in name:
                self.launches[str(args.get("correlation"))] = begin, thread
        elif kind in ("user_annotation", "cpu_op"):
            if name.startswith("ProfilerStep#"):
                self.steps.append(span)
            elif name.startswith("Optimizer.step#"):
                self.optimizers.append(span)
            elif name.startswith((*_RANGES, *_UNREAD_RANGES)):
                self._add_range(span)
            elif kind == "cpu_op":
                self._add_operation(span)

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.info["world_size"]))

    def launch_of(self, one: _Span | _Kernel) -> tuple[float, Any]:
        """Return time and thread of the launch of what a GPU ran; its begin and None if the trace does not have it."""
        correlation = one.correlation if isinstance(one, _Kernel) else str(one.args.get("correlation"))
        return self.launches.get(correlation, (one.begin, None))

    def drop_earlier(self) -> None:
        """Drop what GPUs ran before the first event of their streams whose launch is in the trace."""
        first: dict[Any, float] = {}
        for one in chain[_Span | _Kernel](self.kernels, self.collectives):
            if self.launch_of(one)[1] is not None:
                first[one.thread] = min(one.begin, first.get(one.thread, math.inf))

        def is_earlier(one: _Span | _Kernel) -> bool:
            return one.begin < first.get(one.thread, -math.inf)

        earlier = filter(is_earlier, chain[_Span | _Kernel](self.kernels, self.collectives))
        self.earlier_end = max((one.end for one in earlier), default=-math.inf)
        self.kernels = [one for one in self.kernels if not is_earlier(one)]
        self.collectives = [one for one in self.collectives if not is_earlier(one)]

    def keep_host(self) -> None:
        """Keep the annotations of the host, each step once: some versions of PyTorch repeat them for GPUs' streams."""
        self.optimizers, self.ranges, steps = (
            [one for one in sorted(spans, key=lambda one: one.begin) if one.thread not in self.streams]
            for spans in (self.optimizers, self.ranges, self.steps)
        )
        self.steps = sorted({one.name: one for one in reversed(steps)}.values(), key=lambda one: one.begin)
        if len({one.thread[0] for one in steps}) > 1:
            raise UsageError(f"{self.path} has the steps of several processes: name one trace per rank")

    def _add_of_device(self, span: _Span, kind: str) -> None:
        if kind in _OTHER_DEVICES:
            raise UsageError(f"{self.path} is of a device that is no GPU ({kind}): its collectives are not known")
        self.streams.add(span.thread)
        if kind == "kernel" and "nccl" in span.name.lower():
            self.collectives.append(span)
        else:
            self.kernels.append(_Kernel(span.begin, span.end, span.thread, str(span.args.get("correlation"))))

    def _add_range(self, span: _Span) -> None:
        if span.name.startswith(_RANGES):
            self.ranges.append(span)
        else:
            self.unread.add(span.name.partition(":")[0])

    def _add_operation(self, span: _Span) -> None:
        begins, ends = self.operations[span.thread]
        begins.append(span.begin)
        ends.append(span.end)
        if span.name == _PARAMETERS:
            self.parameters.append(span)
        elif span.name.startswith("c10d::"):
            self.calls.append(span)
        elif span.name.startswith("autograd::engine::evaluate_function"):
            self.backward.append(span.begin)

    def add_shapes(self) -> None:
        """Add to the operations of communication the inputs that the execution trace has of them.

        Both have the same ids since PyTorch 2.4, and in one run the same operations in the same order.
        """
        every = [*self.ranges, *self.calls, *self.parameters]
        ids = {id(one): one.args.get("Record function id") or one.args.get("External id", -1) for one in every}
        if not any(one.args.get("Record function id") for one in every):
            ordered = sorted(every, key=lambda one: (one.begin, -one.end))
            if [one.name for one in ordered] == [name for _, (name, _) in sorted(self.shapes.items())]:
                ids = dict(zip(map(id, ordered), sorted(self.shapes), strict=True))
        self.ranges, self.calls, self.parameters = (
            [self._with_shapes(one, ids[id(one)]) for one in spans]
            for spans in (self.ranges, self.calls, self.parameters)
        )

    def _with_shapes(self, span: _Span, number: int) -> _Span:
        """Return an event with the inputs that the execution trace has of the operation of this id."""
        found = self.shapes.get(number)
        if found is None:
            return span
        name, inputs = found
        if name != span.name:
            raise UsageError(f"the execution trace of {self.path} is of another run: it has {name!r} for {span.name!r}")
        values = [str(value) for value in inputs["values"]]
        more = {"Input Dims": inputs["shapes"], "Input type": inputs["types"], "Concrete Inputs": values}
        return span._replace(args=span.args | more)


def read_kineto_traces(
    paths: Sequence[Path], execution_traces: Sequence[Path] = (), *, alike: bool = False, steps: int = 1
) -> list[RankProfile]:
    """Read Kineto traces, one per rank, as profiles.

    Args:
        paths: the files, as JSON or compressed with gzip, or directories of them.
        execution_traces: PyTorch's execution traces of the same runs, in the same order.
        alike: ranks may have no trace.
        steps: steps of the profiler in an iteration.

    Raises:
        UsageError: a file cannot be read, has no iteration or no collective, or is missing.
    """
    files = [file for path in paths for file in _files(path)]
    if execution_traces and len(execution_traces) != len(files):
        raise UsageError(
            f"{len(execution_traces)} execution traces and {counted(len(files), 'Kineto trace')}: name one per Kineto "
            "trace, in the same order"
        )
    found: dict[int, RankProfile] = {}
    for place, path in enumerate(files):
        profile = _read(path, execution_traces[place] if execution_traces else None, len(files), alike, steps)
        if profile.rank in found:
            raise UsageError(f"{path} and {found[profile.rank].path} are both of rank {profile.rank}: name one of them")
        found[profile.rank] = profile
    sizes = {profile.ranks: profile.path for profile in found.values()}
    if len(sizes) > 1:
        (one, path), (another, other) = list(sizes.items())[:2]
        raise UsageError(f"{path} is of {one} ranks and {other} of {another}: name the traces of one job")
    return [found[rank] for rank in sorted(found)]


def _files(path: Path) -> list[Path]:
    """Return the traces of a directory, or a file itself."""
    if not path.is_dir():
        return [path]
    found = sorted(file for pattern in _FILES for file in path.glob(pattern))
    if not found:
        raise UsageError(f"{path} has no {' and no '.join(_FILES)}: name the directory of torch.profiler's traces")
    return found


def _read(path: Path, execution_trace: Path | None, traces: int, alike: bool, steps: int) -> RankProfile:
    trace = _Trace(path, {} if execution_trace is None else _read_shapes(execution_trace))
    number, keys = 0, set()
    try:
        for key, value in members(path, "traceEvents"):
            keys.add(key)
            if key == "traceEvents":
                number += 1
                if number > MAX_EVENTS:
                    raise UsageError(f"{path} has more than {MAX_EVENTS:,} events: profile fewer iterations")
                trace.add(value)
            elif key == "distributedInfo":
                check(value, _INFO)
                trace.info = value
        if not number:
            advice = "name it with --execution-trace" if "nodes" in keys else "name what torch.profiler exported"
            raise UsageError(f"{path} is not a Kineto trace, which has traceEvents: {advice}")
        says_ranks = "world_size" in trace.info
        _check_rank(trace, traces, alike)
        number = 0
        profile = _profile(trace, steps, says_share=alike or trace.info["rank"] == 0)
        if not says_ranks:
            profile.assumptions.append("the job has as many ranks as there are traces, as these do not say how many")
        return profile
    except (ValueError, LookupError, TypeError, OverflowError, AttributeError) as error:
        where = f"{path}, event {number}" if number else str(path)
        raise UsageError(f"{where} is damaged ({error}): use it as torch.profiler exports it") from error


def _check_rank(trace: _Trace, traces: int, alike: bool) -> None:
    """Check that a trace is of a rank of the job, and add the number of ranks if it is that of the traces."""
    path, info = trace.path, trace.info
    if "rank" not in info:
        raise UsageError(
            f"{path} has no distributedInfo with a rank: profile a distributed job, or add the member "
            f'"distributedInfo": {{"rank": R, "world_size": N}} to it'
        )
    if alike and "world_size" not in info:
        raise UsageError(f"{path} does not say how many ranks its job has: add world_size to its distributedInfo")
    of = f" of {info['world_size']}" if "world_size" in info else ""
    ranks = info.setdefault("world_size", traces)
    if info["rank"] >= ranks or traces > ranks or (traces < ranks and not alike):
        advice = ", or add --alike if all ranks do the same" if traces < ranks else ""
        raise UsageError(
            f"{path} is of rank {info['rank']}{of}, but --kineto names {counted(traces, 'trace')}: name one per "
            f"rank{advice}"
        )


def _read_shapes(path: Path) -> dict[int, tuple[str, dict[str, Any]]]:
    """Return name and inputs of the operations of torch.distributed and its backends, by their record function ids."""
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    try:
        for key, node in members(path, "nodes"):
            if key != "nodes" or not str(node["name"]).startswith(("c10d::", _PARAMETERS, *_RANGES)):
                continue
            if "input_shapes" in node:  # schema 1.0.1
                names = {"values": "inputs", "shapes": "input_shapes", "types": "input_types"}
                node["inputs"], ids = {key: node[name] for key, name in names.items()}, [node["rf_id"]]
            else:
                check(node, {"attrs": [dict]})
                ids = [one["value"] for one in node["attrs"] if one.get("name") == "rf_id"]
            check(node, {"name": str, "inputs": {"values": list, "shapes": list, "types": [str]}})
            found |= dict.fromkeys(ids, (node["name"], node["inputs"]))
    except (ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{path} is not an execution trace of PyTorch ({error})") from error
    if not found:
        raise UsageError(f"{path} has no collective: it is not an execution trace of a distributed job of PyTorch")
    return found


def _profile(trace: _Trace, steps_each: int, *, says_share: bool) -> RankProfile:
    trace.keep_host()
    if trace.shapes:
        trace.add_shapes()
    trace.drop_earlier()
    path, steps = trace.path, trace.steps
    if not steps:
        raise UsageError(f"{path} has no iteration: call step() of torch.profiler, with a schedule, in each one")
    is_gpu = bool(trace.kernels or trace.collectives)
    calls = sorted(_nccl_calls(trace) if is_gpu else _gloo_calls(trace), key=lambda call: (call.launched, call.begin))
    if not calls:
        raise _without_calls(trace, is_gpu)
    edges, rest = _edges(trace, steps_each)
    timelines = list(_gpu_timelines(trace, calls, edges) if is_gpu else _cpu_timelines(trace, calls, edges))
    if rest or (is_gpu and len(timelines) > 1):
        del timelines[0]
    device = "cuda" if is_gpu else "cpu"
    profile = RankProfile(trace.info["rank"], path, trace.info["world_size"], [], [], device, [], None)
    profile.descriptions = trace.descriptions
    profile.iterations = [timeline.iteration() for timeline in timelines]
    profile.advice = _advice(profile.iterations, steps_each)
    if not any(one.signatures for one in profile.iterations):
        raise UsageError(f"{path} has no collective in the iterations that can be used: profile more iterations")
    profile.assumptions = list(_ASSUMED_OF_GPUS if is_gpu else _ASSUMED_OF_CPUS)
    if is_gpu and (len(edges) > 2 or trace.earlier_end < edges[0]):
        profile.assumptions.append(_BEGIN_OF_MANY if len(edges) > 2 else _BEGIN_OF_ONE)
    if steps_each > 1:
        profile.assumptions.append(f"an iteration is {steps_each} steps of the profiler, as --steps says")
    if is_gpu and says_share:
        share = sum(one.busy for one in timelines) / max(1e-9, sum(one.end - one.begin for one in timelines))
        profile.assumptions.append(
            f"while a GPU computes nothing and no stream waits, the host does (the GPU of rank {profile.rank} runs "
            f"{share:.0%} of the time)"
        )
    if not is_gpu and any(call.communication.peer is not None for call in calls):
        profile.assumptions.append("a rank waits until what it sends or receives has ended")
    if any(edges[0] <= at < edges[-1] for at in trace.left_out):
        profile.assumptions.append("calls of torch.distributed for which gloo has no range send nothing")
    if "pg_config" not in trace.info:
        profile.assumptions.append("a collective is of all ranks where the trace does not say of which")
    return profile


def _without_calls(trace: _Trace, is_gpu: bool) -> UsageError:
    """Return the error of a trace without a collective that can be read."""
    path = trace.path
    if is_gpu and any(one.name.startswith("gloo:") for one in trace.ranges):
        return UsageError(f"{path} has kernels of a GPU and collectives of gloo, which have none: use NCCL with GPUs")
    if trace.unread:
        return UsageError(f"{path} has collectives of {', '.join(sorted(trace.unread))}: use NCCL, RCCL or gloo")
    hint = ", or unset TORCH_DISTRIBUTED_USE_TORCHCOMMS with gloo" if trace.parameters and not is_gpu else ""
    advice = f"profile a distributed job, GPUs too{hint}"
    return UsageError(f"{path} has no kernel of NCCL and no collective of gloo: {advice}")


def _edges(trace: _Trace, steps_each: int) -> tuple[list[float], int]:
    """Return the begins of iterations and the end of the last, and the number of steps before the first whole one."""
    steps = trace.steps
    if len(steps) < steps_each:
        raise UsageError(f"{trace.path} has {counted(len(steps), 'step')}, fewer than the {steps_each} of --steps")
    rest = len(steps) % steps_each
    begins = [step.begin for step in [*steps[: min(rest, 1)], *steps[rest::steps_each]]]
    return [*begins, steps[-1].end], rest


def _advice(iterations: Sequence[ProfiledIteration], steps_each: int) -> str:
    """Return what to do if iterations are not alike: to name the number of steps after which they repeat."""
    shapes = [(len(one.signatures), sum(event.code == "stepped" for event in one.events)) for one in iterations]
    periods = (period for period in range(2, len(shapes)) if shapes[period:] == shapes[:-period])
    period = next(periods, None)
    if period is None:
        return "name the number of steps of the profiler in an iteration with --steps"
    return f"add --steps {period * steps_each}, the number of steps of the profiler after which they repeat"


class _Timeline:
    """The events of an iteration on the line of time of a rank's computation; times in us."""

    def __init__(self, begin: float) -> None:
        self.begin = self.end = begin
        self.busy = 0.0  # in which kernels run
        self.pending: dict[int, _Call] = {}  # for which nothing has waited
        self._calls: list[_Call] = []
        self._events: list[tuple[float, str, int]] = []

    def mark(self, at: float, code: str) -> None:
        """Add the begin or end of a pass, or of an optimizer step."""
        self._events.append((at, code, -1))

    def call(self, at: float, call: _Call) -> None:
        number = len(self._calls)
        self._calls.append(call)
        self._events += [(at, "call", number), (max(at, call.returned), "called", number)]
        if call.communication.returns_at_once:
            self.pending[number] = call

    def wait(self, begin: float, end: float, numbers: Sequence[int]) -> None:
        self._events += [(begin, "wait", number) for number in numbers]
        self._events += [(end, "waited", number) for number in numbers]
        for number in numbers:
            del self.pending[number]

    def finish(self, at: float) -> None:
        """End the iteration when its computation and all of its communication have ended."""
        numbers = list(self.pending)
        self.end = max([at, *(self.pending[number].end for number in numbers)])
        self.wait(at, self.end, numbers)

    def iteration(self) -> ProfiledIteration:
        """Return the iteration; what the host does later than a GPU belongs to the next one."""
        events = [
            Event(self._ns(min(at, self.end)), code, number, number if code == "call" else -1)
            for at, code, number in self._events
        ]
        events.sort(key=lambda event: event.at_ns)
        signatures = [call.communication for call in self._calls]
        ends_ns = {number: self._ns(call.end) for number, call in enumerate(self._calls)}
        return ProfiledIteration(0, self._ns(self.end), 0, events, signatures, ends_ns)

    def _ns(self, at: float) -> int:
        return round((at - self.begin) * 1000)


def _gpu_timelines(trace: _Trace, calls: Sequence[_Call], edges: Sequence[float]) -> Iterator[_Timeline]:
    """Yield the timelines of iterations, each from the end of the kernels of the one before."""
    steps: list[tuple[float, float, str, Any]] = [
        (trace.launch_of(kernel)[0], kernel.begin, "kernel", kernel.end) for kernel in trace.kernels
    ]
    steps += [(call.launched, call.begin, "call", call) for call in calls]
    steps += [(at, at, "wait", None) for at in _waits(trace)]
    steps += [(at, at, code, None) for at, code in _marks(trace, edges)]
    steps.sort(key=lambda step: step[:3])
    launched = [step[0] for step in steps]
    now = max(edges[0], trace.earlier_end)
    for first, last in pairwise(edges):
        timeline, awaited, since = _Timeline(now), dict[int, _Call](), now
        for at, begin, code, what in steps[bisect_left(launched, first) : bisect_left(launched, last)]:
            if code == "kernel":
                ended = [number for number, call in awaited.items() if call.end <= begin and number in timeline.pending]
                since = max(now, since)
                timeline.wait(since, max([since, *(awaited[number].end for number in ended)]), ended)
                awaited = {}
                timeline.busy += max(0.0, what - max(now, begin))
                now = max(now, what)
            elif code == "call":
                timeline.call(max(timeline.begin, min(max(now, at), begin)), what)
            else:
                if code in ("wait", "step"):
                    awaited, since = dict(timeline.pending), at
                if code != "wait":
                    timeline.mark(max(now, at), code)
        timeline.finish(now)
        yield timeline
        now = timeline.end


def _cpu_timelines(trace: _Trace, calls: Sequence[_Call], edges: Sequence[float]) -> Iterator[_Timeline]:
    """Yield the timelines of iterations of the thread with the annotations of steps."""
    begins, ends = (sorted(times) for times in trace.operations[trace.steps[0].thread])
    launched = [call.launched for call in calls]
    marks = _marks(trace, edges)
    for first, last in pairwise(edges):
        timeline = _Timeline(first)
        for call in calls[bisect_left(launched, first) : bisect_left(launched, last)]:
            timeline.call(call.launched, call)
        gaps = defaultdict(list)
        for call in timeline.pending.values():
            ended = bisect_right(ends, call.end) - 1
            begun = bisect_right(begins, call.end) - 1
            is_idle = ended >= 0 and (begun < 0 or begins[begun] <= ends[ended]) and call.end <= last
            if is_idle and call.end - max(ends[ended], call.launched) >= 1e6 * WAIT_S:
                gaps[ends[ended]].append(call.end)
        steps: list[tuple[float, str, float]] = [(gap, "wait", max(gaps[gap])) for gap in gaps]
        steps += [(at, code, at) for at, code in marks if first <= at < last]
        for at, code, until in sorted(steps):
            if code != "wait":
                timeline.mark(at, code)
            if code in ("wait", "step"):
                timeline.wait(at, until, [number for number, call in timeline.pending.items() if call.end <= until])
        timeline.finish(last)
        yield timeline


def _marks(trace: _Trace, edges: Sequence[float]) -> list[tuple[float, str]]:
    """Return begins and ends of passes and of optimizer steps, on the clock of the host."""
    found = []
    backward, until = sorted(trace.backward), 0.0
    for first, last in pairwise(edges):
        place = bisect_left(backward, first)
        begin = backward[place] if place < len(backward) and backward[place] < last else math.inf
        if begin < last:
            found.append((begin, "backward"))
        for step in sorted(trace.optimizers, key=lambda step: step.begin):
            if first <= step.begin < last and step.begin >= until:  # not within another one
                until = step.end
                if begin < step.begin:
                    found.append((step.begin, "backward_end"))
                    begin = math.inf
                found += [(step.begin, "step"), (step.end, "stepped")]
    return found


class _Enclosing:
    """Spans of threads, found by a time within them."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self._spans = defaultdict[Any, list[_Span]](list)
        for span in sorted(spans, key=lambda one: one.begin):
            self._spans[span.thread].append(span)

    def find(self, at: float, thread: Any) -> _Span | None:
        """Return the last span of a thread that has begun, if it has not ended."""
        spans = self._spans.get(thread, [])
        place = bisect_right(spans, at, key=lambda span: span.begin) - 1
        return spans[place] if place >= 0 and at <= spans[place].end else None


def _launchers(trace: _Trace) -> Iterator[tuple[_Span, float, _Span | None, _Span | None]]:
    """Yield each kernel of NCCL with the time of its launch, and the parameters and the range of its collective."""
    parameters, ranges = _Enclosing(trace.parameters), _Enclosing(trace.ranges)
    for kernel in trace.collectives:
        launched, thread = trace.launch_of(kernel)
        yield kernel, launched, parameters.find(launched, thread), ranges.find(launched, thread)


def _waits(trace: _Trace) -> list[float]:
    """Return the times of waits of streams, without those that are part of a collective's launch."""
    launchers = [span for _, _, parameters, range_ in _launchers(trace) for span in (parameters, range_) if span]
    enclosing = _Enclosing(launchers)
    return [at for at, thread in trace.waits if enclosing.find(at, thread) is None]


def _nccl_calls(trace: _Trace) -> list[_Call]:
    """Return the collectives of NCCL's kernels; several kernels of one call are one."""
    found: dict[Any, _Call] = {}
    for kernel, launched, parameters, range_ in _launchers(trace):
        key = (parameters or range_ or kernel)[:4]
        if key in found:
            begin, end = min(found[key].begin, kernel.begin), max(found[key].end, kernel.end)
            found[key] = found[key]._replace(begin=begin, end=end)
            continue
        args = next((one.args for one in (kernel, parameters) if one and "Collective name" in one.args), None)
        if args is not None:
            kind = _kind(trace, args["Collective name"])
            check(args, {"In msg nelems": COUNT, "dtype": str})
            size_bytes = args["In msg nelems"] * _element_bytes(trace, args["dtype"])
        elif range_ is not None:
            args, kind, size_bytes = {}, _kind(trace, range_.name), _input_bytes(trace, range_)
        else:
            raise UsageError(
                f"{trace.path}: kernel {kernel.name[:60]!r} has no collective name and size: record it with "
                "record_shapes=True and a recent PyTorch, and without coalesced collectives"
            )
        size_bytes = 0 if kind == "barrier" else size_bytes
        peer = args.get({"send": "Dst Rank", "recv": "Src Rank"}.get(kind, ""))
        of = str([args.get(name) for name in _GROUP])
        if of not in trace.groups:
            trace.groups[of] = _group(trace, args)
        ranks = trace.groups[of]
        trace.descriptions[ranks].update(_descriptions(trace, args))
        communication = Communication(kind, size_bytes, ranks, peer, backend="nccl")
        if kind == "all_to_all":
            is_even = args.get("Out msg nelems") in (None, args.get("In msg nelems"))
            text = args.get("In split size")
            whole = _whole_splits(parameters) if trace.shapes and parameters else ""
            # of lists of tensors, which may be uneven, an execution trace has no rows
            if whole.strip("[]") or (whole and text is None and range_ and len(range_.args["Input Dims"]) == 1):
                text = whole
            communication = _with_splits(trace, communication, text, is_even=is_even)
        found[key] = _Call(launched, kernel.begin, kernel.end, communication, launched)
    return list(found.values())


def _whole_splits(parameters: _Span) -> str:
    """Return the list of the rows to each rank that an execution trace has of an all-to-all; empty if there is none."""
    values = [str(value) for value in parameters.args.get("Concrete Inputs", [])]
    return next((after for name, after in pairwise(values) if name.startswith("all_to_all")), "")


def _gloo_calls(trace: _Trace) -> list[_Call]:
    """Return the calls that gloo carried out: the first range of its kind that begins after a call is its own."""
    ranges: dict[str, deque[_Span]] = defaultdict(deque)
    for one in sorted(trace.ranges, key=lambda span: span.begin):
        if one.name.startswith("gloo:"):
            ranges[_kind(trace, one.name)].append(one)
    found = []
    for call in sorted(trace.calls, key=lambda span: span.begin):
        kind = _kind(trace, call.name)
        other = CARRIED_OUT_BY_GLOO.get(kind, "")
        carried_out_as = other if not ranges[kind] and ranges[other] else ""
        waiting = ranges[carried_out_as or kind]
        while waiting and waiting[0].begin < call.begin:
            waiting.popleft()
        if not waiting:
            trace.left_out.append(call.begin)
            continue
        one = waiting.popleft()
        size_bytes = 0 if kind == "barrier" else _input_bytes(trace, one)
        # operations have their options last: of a collective, that it returns at once, and a timeout
        values = [str(value) for value in call.args.get("Concrete Inputs", [])][-2:]
        communication = Communication(
            kind, size_bytes, _group(trace, {}), backend="gloo", carried_out_as=carried_out_as
        )
        if kind == "all_to_all":
            lists = [str(value) for value in call.args.get("Concrete Inputs", []) if str(value).startswith("[")]
            communication = _with_splits(trace, communication, lists[-1] if lists else None)
        if kind in ("send", "recv"):
            peer, tag = map(int, values)
            check(tag, _TAG, "a tag")
            communication = communication._replace(peer=peer, tag=tag, returns_at_once=False)
        elif values[:1] == ["False"]:
            communication = communication._replace(returns_at_once=False)
        returned = call.end if communication.returns_at_once else max(call.end, one.end)
        found.append(_Call(call.begin, one.begin, one.end, communication, returned))
    return found


def _with_splits(
    trace: _Trace, communication: Communication, text: str | None, *, is_even: bool = True
) -> Communication:
    """Return an all-to-all with its bytes to each rank.

    Args:
        trace: its trace.
        communication: its kind, bytes and ranks.
        text: list of the rows to each rank, empty if all are alike; None: the trace does not say.
        is_even: False if it cannot be even.
    """
    rows, ranks = [int(row) for row in re.findall(r"\d+", str(text))], len(communication.ranks)
    if ranks > 1 and len(rows) != ranks and (rows or text is None or not is_even):
        raise UsageError(
            f"{trace.path} has an all-to-all of {ranks} ranks with {len(rows)} split sizes, so that the bytes to each "
            "rank are not known: PyTorch cuts long lists short, and has none of lists of tensors or without shapes; "
            "--execution-trace has whole lists"
        )
    total = max(1, sum(rows))
    return communication._replace(splits=tuple(communication.size_bytes * row // total for row in rows))


def _kind(trace: _Trace, name: Any) -> str:
    letters = str(name).rpartition(":")[2].replace("_", "").lower()
    kind = next((kind for begin, kind in _KINDS.items() if letters.startswith(begin)), None)
    if kind is None:
        raise UsageError(f"{trace.path} has a collective {str(name)[:40]!r}, of which kind and size are not recorded")
    return kind


def _element_bytes(trace: _Trace, name: str) -> int:
    plain = name.lower().replace("c10::", "")
    plain = plain.rpartition("tensor(")[2].rstrip(")]")
    if plain.startswith("float8"):
        return 1
    if plain not in _ELEMENT_BYTES:
        raise UsageError(f"{trace.path} has a collective of the type {name[:40]!r}: how many bytes is not known")
    return _ELEMENT_BYTES[plain]


def _input_bytes(trace: _Trace, one: _Span) -> int:
    """Return the bytes of the tensors that a range has as inputs."""
    if not one.args.get("Input Dims") or "Input type" not in one.args:
        advice = " (its execution trace does not have this one)" if trace.shapes else ", or add --execution-trace"
        raise UsageError(f"{trace.path} has no size of {one.name[:60]!r}: profile with record_shapes=True{advice}")
    total = 0
    for dimensions, kind in zip(one.args["Input Dims"], one.args["Input type"], strict=False):
        check(dimensions, [(COUNT, [COUNT])])
        shapes = dimensions if dimensions and isinstance(dimensions[0], list) else [dimensions]
        if any(len(shape) > _MAX_DIMENSIONS for shape in shapes):
            raise ShapeError(f"a tensor has more than {_MAX_DIMENSIONS} dimensions")
        total += sum(math.prod(shape) for shape in shapes) * _element_bytes(trace, kind)
    check(total, COUNT, "the bytes of a collective")
    return total


def _descriptions(trace: _Trace, args: dict[str, Any]) -> list[str]:
    """Return what a framework calls the group of a collective, if the trace says it."""
    name = args.get("Process Group Name")
    texts = [one.get("pg_desc") for one in trace.info.get("pg_config", []) if one.get("pg_name") == name]
    text = args.get("Process Group Description") or next(iter(texts), None)
    return [str(text)] if text else []


def _group(trace: _Trace, args: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks of a collective."""
    every, (name, size, text) = trace.all_ranks, (args.get(each) for each in _GROUP)
    groups = trace.info.get("pg_config", [])
    sizes = {one.get("pg_size", len(re.findall(r"\d+", str(one.get("ranks"))))) for one in groups}
    if size is None and (len(groups) < 2 or sizes == {len(every)}):
        return every
    texts = [text, *(one.get("ranks") for one in groups if name is not None and one.get("pg_name") == name)]
    for each in texts:  # the first one is cut short in large groups
        ranks = [int(rank) for rank in re.findall(r"\d+", str(each))]
        if len(ranks) == size and not set(ranks) <= set(every):
            raise UsageError(
                f"{trace.path} has a collective of rank {max(ranks)} in a job of {counted(len(every), 'rank')}: "
                "correct world_size in its distributedInfo"
            )
        if len(ranks) == size:
            return every if size == len(every) else tuple(ranks)
    if size == len(every):
        return every
    raise UsageError(f"{trace.path} does not say which ranks take part in a collective: use a recent PyTorch with NCCL")
