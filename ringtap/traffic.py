"""Sends and receives cross traffic from Python: plans, a receiver and a sender, also in notebooks and event loops."""

from __future__ import annotations

import collections
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ringtap.analysis.notebook_formatting import documented
from ringtap.core.check_api_arguments import check_callback, instance_of, option_names_as_arguments, path_of
from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.flow_plan_file import FlowSource, PlanFile, write_plan
from ringtap.core.flow_plan_format import BASIC_VERSION, Flow, Operation
from ringtap.core.host_port import LOCAL, format_address, parse_address
from ringtap.core.run_directory_schema import FLOW_STATES
from ringtap.core.sent_flow_log import NO_SOURCE, SentLog, open_sent_log
from ringtap.core.units import counted, duration_s, format_duration, format_rate
from ringtap.trafficgen.commands.common import TOKEN_VARIABLE
from ringtap.trafficgen.helper_process import Helper, HelperResult, Progress
from ringtap.trafficgen.plans.kind import FROM, NODE, TO, TrafficKind
from ringtap.trafficgen.plans.registry import make_plan, traffic_kinds
from ringtap.trafficgen.receiver.receiver import ReceiveOptions
from ringtap.trafficgen.sender.options import SendOptions
from ringtap.trafficgen.worker_processes import usual_workers

if TYPE_CHECKING:
    import pandas as pd

Address: TypeAlias = "str | tuple[str, int]"
Connections: TypeAlias = Literal["kept", "new"]

_FREE_PORT = "127.0.0.1:0"
_CONNECTIONS = ("kept", "new")


class FlowPlan:
    """A flow plan: which flow starts when, where to and how large. The same arguments always give the same flows.

    ``FlowPlan("consistent", load="1gbit", duration="10s")`` takes the options of
    ``ringtap traffic plan --kind consistent`` as keyword arguments, with underscores for dashes, and
    ``from_``, because Python keeps ``from``. A plan without ``to`` goes where `send` sends it.

    Args:
        kind: kind of traffic: ``consistent``, ``burst``, ``long-lived``, ``on-off``, ``incast``, ``all-to-all``,
            ``ring``, ``replay``, ``list`` or ``workload``.
        to: its receivers: ``host:port``, a pair of host and port, or a list of these.
        options: its other options, such as ``load``, ``duration``, ``seed``, ``sizes`` and ``burst_length``. Rates are
            bit/s, sizes bytes and times seconds, or text with a unit; options that may be repeated take a list.

    Attributes:
        kind: kind of traffic.
        duration_s: length in seconds.
        flows: number of flows.
        size_bytes: payload of all flows; None if flows last until the plan's end.
        destinations: ``host:port`` of the receivers; empty: those that `send` names.

    Raises:
        UsageError: an option is unknown, missing or wrong.
    """

    def __init__(self, kind: str, to: Address | Sequence[Address] | None = None, **options: Any) -> None:
        found = _kind(kind)
        given = _converted(found, {"to": to} | options)
        self._key = "node" if NODE in found.needs else "to"
        has_receivers = self._key in given or found.finds_receivers
        self._make: Callable[[list[str]], FlowSource] = lambda addresses: _made(
            found, given | {self._key: addresses} if addresses else given
        )
        self._describe(self._make([] if has_receivers else [LOCAL]), has_receivers)

    def _describe(self, source: FlowSource, has_receivers: bool) -> None:
        header, self._source = source.header, source
        self.kind = str(header.get("kind", "unknown"))
        self.duration_s: float = header["duration_ns"] / 1e9
        self.flows: int = header["flows"]
        self.size_bytes: int | None = header["bytes"] or None
        self.destinations: list[str] = list(header["destinations"]) if has_receivers else []

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FlowPlan:
        """Read a plan from a file, as `write` and ``ringtap traffic plan`` write it.

        Raises:
            UsageError: the file cannot be read, is not a plan, or a line is wrong.
        """
        file = PlanFile(path_of(path, "the plan"))
        collections.deque(file.flows(), maxlen=0)  # which checks every line
        plan = cls.__new__(cls)
        plan._make = lambda addresses: _Readdressed(file, addresses or file.destinations)
        plan._describe(plan._make([]), has_receivers=True)
        return plan

    def write(self, path: str | os.PathLike[str], force: bool = False) -> Path:
        """Write the plan to a file for ``ringtap traffic send``, and return its path.

        Args:
            path: the file.
            force: overwrite it if it exists.

        Raises:
            UsageError: the plan has no receivers, the file exists, or it cannot be written.
        """
        if not self.destinations:
            raise UsageError("the plan names no receiver for its file: give to='HOST:PORT' to FlowPlan")
        place = path_of(path, "the file")
        with option_names_as_arguments():
            write_plan(self._source, place, force)
        return place

    def sent_to(self, addresses: Sequence[str]) -> FlowSource:
        """Return the header and the flows for these receivers; for the plan's own ones if there are none.

        Raises:
            UsageError: there are no receivers, or the plan cannot go to these.
        """
        if not addresses and not self.destinations:
            raise UsageError("the plan names no receiver: give to='HOST:PORT'")
        return self._make(list(addresses)) if addresses else self._source

    @documented(
        {
            "flow": "number of its line in the plan, from 0.",
            "start_s": "seconds from the launch to its start; if it waits for another flow, to its earliest start.",
            "source": "address that it is sent from; NA: the routing table's choice.",
            "destination": "``host:port`` of its receiver; NA: the one that `send` names.",
            "size_bytes": "payload; NA: it lasts until the plan's end.",
            "after": "number of the flow that must be received first, or of the first of several; NA: none.",
            "delay_s": "seconds from that flow's completion to its start.",
        }
    )
    def to_frame(self) -> pd.DataFrame:
        """Return the flows as a table, one row per flow, in order of their starts; computations have no row."""
        import pandas as pd

        flows = {number: flow for number, flow in enumerate(self._source.flows()) if flow.destination}
        rows = list(flows.values())
        table = pd.DataFrame({"flow": list(flows), "start_s": [flow.start_ns / 1e9 for flow in rows]})
        table["source"] = pd.array([flow.source or None for flow in rows], dtype="string")
        names = [flow.destination if self.destinations else None for flow in rows]
        table["destination"] = pd.array(names, dtype="string")
        table["size_bytes"] = pd.array([flow.size_bytes or None for flow in rows], dtype="Int64")
        table["after"] = pd.array([flow.after[0][0] if flow.after else None for flow in rows], dtype="Int64")
        table["delay_s"] = pd.array([flow.after[0][1] / 1e9 if flow.after else None for flow in rows], dtype="Float64")
        return table

    def __repr__(self) -> str:
        size = "" if self.size_bytes is None else f", {format_rate(self.size_bytes * 8 / self.duration_s)} of payload"
        to = ", ".join(self.destinations[:3]) + (", ..." if len(self.destinations) > 3 else "")
        length = format_duration(self.duration_s)
        return f"<FlowPlan {self.kind}: {counted(self.flows, 'flow')} in {length}{size}{f', to {to}' if to else ''}>"


class _Readdressed:
    """The flows of a plan file, sent to other receivers, in the order of the file's header."""

    def __init__(self, file: PlanFile, addresses: Sequence[str]) -> None:
        if len(addresses) != len(file.destinations):
            raise UsageError(
                f"{file.path} has {counted(len(file.destinations), 'receiver')} and to= {len(addresses)}: name as many"
            )
        self._file, self._to = file, {"": "", **dict(zip(file.destinations, addresses, strict=True))}
        version = max(file.version, BASIC_VERSION)  # the source column of version 1 is written
        self.header = file.header | {"version": version, "sources": list(file.sources), "destinations": list(addresses)}

    def flows(self) -> Iterator[Flow]:
        for flow in self._file.flows():
            yield flow._replace(destination=self._to[flow.destination])


def _kind(name: object) -> TrafficKind:
    kinds = traffic_kinds()
    if not isinstance(name, str) or name not in kinds:
        raise UsageError(
            f"{name!r} is not a kind of traffic: {did_you_mean(name, kinds)}it is one of {', '.join(kinds)}"
        )
    return kinds[name]


def _converted(kind: TrafficKind, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a plan by key, in the units of `make_plan`."""
    given = {key.rstrip("_"): value for key, value in options.items() if value is not None}
    unknown = next((key for key in given if key not in kind.options), None)
    if unknown is not None:
        hint = did_you_mean(unknown, kind.options)
        raise UsageError(f"{kind.name} traffic has no {unknown!r}: {hint}it takes {', '.join(kind.options)}")
    with option_names_as_arguments():
        kind.check(given)
        for key, value in given.items():
            option = kind.options[key]
            if option in (TO, NODE):
                given[key] = _addresses(value)
            elif option == FROM or option.is_repeated:
                given[key] = [option.convert(one) for one in ([value] if isinstance(value, str) else _listed(value))]
            else:
                given[key] = option.convert(value)
    return given


def _made(kind: TrafficKind, given: dict[str, Any]) -> FlowSource:
    with option_names_as_arguments():
        return make_plan(kind.name, given, _read_segments, _read_operations)


def _read_segments(path: Path) -> Iterator[tuple[int, tuple[str, int, str, int], int]]:
    """Read a capture; only the replay of one needs the packages of the analysis."""
    from ringtap.analysis.pcap.read_payload_packets import read_segments

    return read_segments(path)


def _read_operations(path: Path) -> Sequence[Operation]:
    """Read a workload; only the replay of one needs the package that reads it."""
    from ringtap.workload.workload_to_flow_plan import read_operations

    return read_operations(path)


def _listed(value: object) -> list[Any]:
    if isinstance(value, Iterable):
        return list(value)
    raise UsageError(f"{value!r} is neither a text nor a list: give one of them")


def _addresses(value: object) -> list[str]:
    """Return addresses as ``host:port``: of one text or pair of host and port, or of several."""
    if isinstance(value, str):
        parse_address(value)
        return [value]
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], int):
        return _addresses(format_address(str(value[0]), value[1]))
    found = [address for one in _listed(value) for address in _addresses(one)]
    if not found:
        raise UsageError("to= is an empty list: name a receiver, for example '127.0.0.1:5001'")
    return found


@dataclass
class RunningReceiver:
    """A receiver that `receiver` has started.

    Attributes:
        address: ``host:port`` on which it listens.
        summary: its counts after the block: ``flows``, ``bytes``, ``connections``, ``unfinished``, ``refused`` and so
            on; empty before.
    """

    address: str
    summary: dict[str, Any] = field(default_factory=dict)


@contextmanager
def receiver(
    bind: str = _FREE_PORT, *, token: str | None = None, log: str | os.PathLike[str] | None = None
) -> Iterator[RunningReceiver]:
    """Receive flows and discard their data within the block, as ``ringtap traffic serve`` does.

    The receiver is a process of its own, which ends with the block, and with this process.

    Args:
        bind: ``host:port`` to listen on (default: a free port of the loopback interface).
        token: text that senders must have, too; needed beyond loopback (default: the variable ``RINGTAP_TOKEN``).
        log: record file of the flows to create.

    Raises:
        UsageError: the address or the log cannot be used.
        MeasurementError: the receiver failed.
    """
    parse_address(instance_of(bind, str, "the address", "host:port"))
    workers, threads = usual_workers()
    options = ReceiveOptions(bind, _token(token), _path(log), workers=workers, threads=threads)
    with option_names_as_arguments(), Helper() as helper:
        helper.ask("serve", options)
        running = RunningReceiver(str(helper.receive()))
        yield running
        helper.stop()
        running.summary = helper.result()


@dataclass(frozen=True, repr=False)
class SendResult:
    """The result of `send`.

    Attributes:
        flows: number of flows launched.
        finished: flows that their receivers have completely.
        unfinished: flows that had not ended at the end.
        failed: flows whose connection broke or was refused.
        first_failure: reason of the first failed flow; empty if none failed.
        duration_s: seconds during which flows were launched.
        offered_bps: payload rate of the launched flows in bit/s.
        achieved_bps: payload rate that receivers acknowledged in bit/s, up to the last finish if that is later than
            ``duration_s``.
        summary: all statistics, as ``ringtap traffic send --json`` prints them.
    """

    flows: int
    finished: int
    unfinished: int
    failed: int
    first_failure: str
    duration_s: float
    offered_bps: float
    achieved_bps: float
    summary: dict[str, Any]
    _log: SentLog
    _records: bytes

    @documented(
        {
            "flow": "number of the flow in the plan.",
            "start_ns": "start; NA: it never had a connection.",
            "lateness_s": "seconds from its planned start to its start.",
            "completion_s": "seconds from its start to the receiver's notice; NA: it has not finished.",
            "size_bytes": "payload; NA: it lasts until the plan's end.",
            "sent_bytes": "payload that this host's kernel accepted.",
            "acked_bytes": "payload that the receiver's kernel acknowledged.",
            "retransmissions": "segments that were sent again.",
            "rtt_us": "smoothed round-trip time at its end; NA: unknown.",
            "min_rtt_us": "smallest round-trip time of its connection, by the kernel; NA: unknown.",
            "state": "``finished``, ``unfinished`` or ``failed``.",
            "source": "address that it was sent from; NA: the routing table's choice.",
            "destination": "``host:port`` of its receiver.",
        }
    )
    def to_frame(self) -> pd.DataFrame:
        """Return the log of the flows as a table, one row per flow, in the order of the plan."""
        import numpy as np
        import pandas as pd

        rows = np.frombuffer(self._records, np.dtype([(column.name, column.type) for column in self._log.file.fields]))
        log = pd.DataFrame({name: rows[name] for name in rows.dtype.names or ()}).sort_values("flow", ignore_index=True)
        times = log[["start_ns", "finish_ns"]].astype("Int64")
        started, finished = times["start_ns"] > 0, times["finish_ns"] > 0
        table = pd.DataFrame({"flow": log["flow"], "start_ns": times["start_ns"].where(started)})
        table["lateness_s"] = (log["lateness_ns"] / 1e9).astype("Float64").where(started)
        table["completion_s"] = ((times["finish_ns"] - times["start_ns"]) / 1e9).where(finished)
        table["size_bytes"] = log["size_bytes"].astype("Int64").where(log["size_bytes"] > 0)
        table[["sent_bytes", "acked_bytes"]] = log[["sent_bytes", "acked_bytes"]]
        table["retransmissions"] = log["retransmits"]
        for name in ("rtt_us", "min_rtt_us"):
            table[name] = log[name].astype("Int64").where(log[name] > 0)
        names = {number: name for name, number in FLOW_STATES.items()}
        table["state"] = log["state"].map(names).astype("string")
        table["source"] = log["source"].map({NO_SOURCE: None} | dict(enumerate(self._log.sources))).astype("string")
        table["destination"] = log["destination"].map(dict(enumerate(self._log.destinations))).astype("string")
        return table

    def __repr__(self) -> str:
        states = f"{self.finished} finished, {self.unfinished} unfinished, {self.failed} failed"
        rates = f"{format_rate(self.offered_bps)} offered, {format_rate(self.achieved_bps)} achieved"
        return f"<Sent {counted(self.flows, 'flow')} in {format_duration(self.duration_s)}: {states}; {rates}>"


def send(
    plan: FlowPlan | str | os.PathLike[str],
    to: Address | Sequence[Address] | None = None,
    *,
    duration: float | str | None = None,
    connections: Connections = "kept",
    token: str | None = None,
    log: str | os.PathLike[str] | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> SendResult:
    """Send the flows of a plan, each at its time, as ``ringtap traffic send`` does; return when all have ended.

    The sender is a process of its own, which ends with this call, and with this process.

    Args:
        plan: the plan, or the path of its file.
        to: receivers instead of the plan's: ``host:port``, a pair of host and port, or a list of these; a plan from a
            file needs as many as it has.
        duration: time after which no more flows are launched, in seconds or as text (default: to the plan's end).
        connections: ``kept`` and reused, or a ``new`` one for each flow.
        token: the receivers' token (default: the variable ``RINGTAP_TOKEN``).
        log: record file of the flows to create.
        progress: called in this thread about once a second with the seconds since the launch and those of the whole
            plan; an exception that it raises ends the sender.

    Raises:
        UsageError: an argument is wrong, or this host cannot send the plan.
        MeasurementError: no receiver answers, or the sender failed.

    Warns:
        RingtapWarning: a receiver does not answer, or the plan is more than this host was calibrated for.
    """
    if not isinstance(plan, FlowPlan):
        plan = FlowPlan.read(plan)
    if connections not in _CONNECTIONS:
        raise UsageError(
            f"connections {connections!r} is unknown: {did_you_mean(connections, _CONNECTIONS)}kept or new"
        )
    check_callback(progress)
    seconds = None if duration is None else duration_s(duration, "the duration")
    addressed = plan.sent_to([] if to is None else _addresses(to))
    workers, threads = usual_workers()
    with (
        option_names_as_arguments(),
        tempfile.TemporaryDirectory(prefix="ringtap-", ignore_cleanup_errors=True) as folder,
        Helper(Path(folder)) as helper,
    ):
        file, kept = Path(folder, "flows.plan"), _path(log) or Path(folder, "flows.rec")
        write_plan(addressed, file)
        token = _token(token)
        options = SendOptions(kept, seconds, token, connections=connections, workers=workers, threads=threads)
        helper.ask("send", file, options)
        while not isinstance(message := helper.receive(), HelperResult):
            if progress is not None and isinstance(message, Progress):
                progress(*message)
        summary = message.result
        found = open_sent_log(kept)
        records = found.file.packed()
    names = ("flows", "finished", "unfinished", "failed", "first_failure", "duration_s", "offered_bps", "achieved_bps")
    statistics: dict[str, Any] = {name: summary[name] for name in names}
    return SendResult(**statistics, summary=summary, _log=found, _records=records)


def _token(token: str | None) -> str:
    return os.environ.get(TOKEN_VARIABLE, "") if token is None else instance_of(token, str, "the token")


def _path(path: str | os.PathLike[str] | None) -> Path | None:
    return None if path is None else path_of(path, "the log").absolute()
