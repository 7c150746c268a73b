"""Finds what disturbs a sweep's window: lost links, frames with errors, stalls, other traffic, and late samples.

Other traffic is what a host's interfaces counted minus what the sweep's own TCP connections transferred: those of the
training job's processes, and those of the cross traffic's port.
"""

from __future__ import annotations

import math
import socket
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ringtap.agents.hosts import Hosts
from ringtap.agents.sweep.host_roles import Attachment, SweepRoles
from ringtap.core.append_only_logs import read_json_lines
from ringtap.core.clock_steps import clock_set_ns
from ringtap.core.counter_growth import growth
from ringtap.core.counter_log_reader import CounterLog
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.ethernet import family_of, headers_bytes
from ringtap.core.link_counter_sources import NIC, SOURCES, log_of, nic_counter
from ringtap.core.run_directory import open_log
from ringtap.core.run_directory_schema import (
    AGENT_LOG,
    LINK_STATE,
    LINKS_JSONL,
    NIC_REC,
    OWNER,
    OWNERS_JSONL,
    SOCKETS_REC,
)
from ringtap.core.units import counted, format_change, format_rate

# on links of 250 Mbit/s, ringtap itself caused 0.2 Mbit/s without load; under load, all but 0.5 % was accounted for
MAX_OTHER_SHARE = 0.03
MAX_ERROR_SHARE = 1e-4
# An iteration that is longer than the median by so much stalled if the bottleneck had room meanwhile. Congestion fills
# it; resending after a loss takes 0.2 s, and three times in a row 1.4 s
STALL_ITERATIONS, STALL_S, STALL_LOAD = 5, 1.5, 0.9
# Iterations changed within a window if those after a moment are longer than those before it in this share of all pairs,
# by this ratio of the medians, while the bottleneck carried less; each part has so many iterations, and such a share.
# More load carries more, too. Among 400 series of 15 to 100 correlated iterations, times alone changed so in up to 26 %
CHANGE_PAIRS, _CHANGE_LONGER, CHANGE_CARRIED = 0.98, 0.1, 0.9
_CHANGE_ITERATIONS, _CHANGE_SHARE = 5, 0.2
_SOCKETS_S = 0.1  # sufficient for connections
RECORDED_S = 0.3  # delay until the last samples of a window are in the logs
_SILENT_S = 5.0  # without new samples, after which a host records no more
# windows are timed by CLOCK_MONOTONIC, so that the small steps by which some hypervisors keep a clock disturb nothing
_DISTURBING_STEP_NS = 20_000_000


def collect_options(network: SweepRoles, node: str, *names: str) -> list[str]:
    """Return options of ``ringtap run``: a node's interfaces, other collectors, and the bottleneck's counters.

    Interfaces are sampled every 10 ms for the check of late samples.
    """
    sources = network.sources(node)
    periods_s = {source: SOURCES[source].period_s for source in sources}
    periods_s |= {"sockets": _SOCKETS_S} if "sockets" in names else {}
    every = [f"{SOURCES[NIC].period_s:g}s", *(f"{name}={period_s:g}s" for name, period_s in periods_s.items())]
    return ["--collect", ",".join((NIC, *names, *sources)), "--every", ",".join(every)]


class PortBytes(NamedTuple):
    """Payload bytes and segments that one or several connections have transferred."""

    received_bytes: int = 0
    segments_in: int = 0
    sent_bytes: int = 0
    segments_out: int = 0
    acknowledged_bytes: int = 0


# columns of sockets.rec, in the order of PortBytes
_COUNTERS = ("bytes_received", "segs_in", "bytes_sent", "segs_out", "bytes_acked")


class _Connection(NamedTuple):
    """Connection of the sweep with its newest counters; ``is_cross`` is True for cross traffic."""

    is_cross: bool
    inode: int
    header_bytes: int
    counters: PortBytes


class PortRates(NamedTuple):
    """Rates of a host's port in a window, in bit/s, as frames on the wire.

    Attributes:
        total: rate that its interfaces counted, by direction (``rx``, ``tx``).
        own: rate of the sweep's connections, by direction.
        acknowledged_bps: rate of the host's cross traffic that the receiver acknowledged.
    """

    total: dict[str, float]
    own: dict[str, float]
    acknowledged_bps: float


class ConnectionBytes:
    """Bytes that the sweep's connections of a node have transferred, from its growing ``sockets.rec``.

    Args:
        folder: the node's folder.
        port: the interfaces that the connections use.
        cross_end: address and TCP port of the cross traffic's receiver.
        mtu: gives the MTU of a counter's interface.
    """

    def __init__(
        self,
        folder: Path,
        port: Attachment,
        cross_end: tuple[str, int],
        mtu: Callable[[Mapping[str, str]], int | None],
    ) -> None:
        self._folder, self._port, self._cross_end, self._mtu = folder, port, cross_end, mtu
        self._rows = 0
        self._newest: dict[int, _Connection] = {}  # by cookie
        self._window = (0, 0)
        self._rates: PortRates | UsageError = UsageError("no window was measured")

    def rates(self, start_ns: int, end_ns: int) -> PortRates:
        """Return the rates of a window; windows must be queried in order of time.

        Raises:
            UsageError: they were not recorded.
        """
        if self._window != (start_ns, end_ns):
            self._window = (start_ns, end_ns)
            try:
                self._rates = self._measure(start_ns, end_ns)
            except UsageError as error:
                self._rates = error
        if isinstance(self._rates, UsageError):
            raise self._rates
        return self._rates

    def _measure(self, start_ns: int, end_ns: int) -> PortRates:
        path = self._folder / SOCKETS_REC
        if not path.is_file():
            raise UsageError(f"the connections of {self._folder.name} were not recorded")
        records = open_log(path)
        log, total = CounterLog(self._folder / NIC_REC), {}
        if log.file is None:
            raise UsageError(f"the interfaces of {self._folder.name} were not recorded")
        first_ns = last_ns = 0
        before: dict[int, PortBytes] | None = None
        for row in records.tail(self._rows):
            t_ns = row[records.index["mono_ns"]] + log.gap_ns
            if t_ns > end_ns:
                break
            if t_ns >= start_ns:
                first_ns, last_ns = first_ns or t_ns, t_ns
                if before is None and t_ns > first_ns:
                    before = {cookie: connection.counters for cookie, connection in self._newest.items()}
            self._update(row, records.index)
            self._rows += 1
        if before is None:
            raise UsageError(
                f"the connections of {self._folder.name} moved nothing, or were not sampled, in the window"
            )
        seconds = (last_ns - first_ns) / 1e9
        for direction in ("rx", "tx"):
            counters = of_interfaces(self._folder.name, self._port.nics, direction)
            size_bytes = sum(log.frame_bytes(one, self._mtu(one), first_ns, last_ns)[0] for one in counters)
            total[direction] = 8 * size_bytes / seconds
        widths_bits = [records.column(name).wraps_at_bits for name in _COUNTERS]
        received, sent, acknowledged = self._own_bytes(before, widths_bits)
        return PortRates(
            total,
            {"rx": received * 8 / seconds, "tx": sent * 8 / seconds},
            acknowledged * 8 / seconds,
        )

    def _own_bytes(self, before: dict[int, PortBytes], widths_bits: list[int]) -> tuple[float, float, float]:
        """Return bytes that the sweep's connections received and sent, and acknowledged cross traffic, with headers."""
        owned = {item["inode"] for item in read_json_lines(self._folder / OWNERS_JSONL, OWNER)[0]}
        received = sent = acknowledged = 0.0
        for cookie, connection in self._newest.items():
            if connection.is_cross or connection.inode in owned:
                steps = map(growth, before.get(cookie, PortBytes()), connection.counters, widths_bits)
                known = [round(step) for step in steps if step is not None]
                if len(known) < len(_COUNTERS):
                    raise UsageError(f"the counters of a connection of {self._folder.name} were reset in the window")
                grown = PortBytes(*known)
                received += grown.received_bytes + connection.header_bytes * grown.segments_in
                sent += grown.sent_bytes + connection.header_bytes * grown.segments_out
                if connection.is_cross and grown.sent_bytes:
                    headers = connection.header_bytes * grown.segments_out / grown.sent_bytes
                    acknowledged += grown.acknowledged_bytes * (1 + headers)
        return received, sent, acknowledged

    def _update(self, row: tuple[Any, ...], columns: Mapping[str, int]) -> None:
        """Keep the counters of a record's connection if it uses the port."""
        source, destination = (_address(row[columns["family"]], row[columns[key]]) for key in ("source", "destination"))
        ports = (int.from_bytes(row[columns[key]], "big") for key in ("sport", "dport"))
        is_cross = self._cross_end in zip((source, destination), ports, strict=True)
        if source not in self._port.addresses or (destination in self._port.addresses and not is_cross):
            return
        cookie = row[columns["cookie"]]
        known = self._newest.get(cookie)
        self._newest[cookie] = _Connection(
            is_cross=is_cross,
            inode=row[columns["inode"]] or (known.inode if known else 0),
            header_bytes=headers_bytes(family_of(source)),
            counters=PortBytes(*(row[columns[name]] for name in _COUNTERS)),
        )


def _address(family: int, data: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, data[:4])
    text = socket.inet_ntop(socket.AF_INET6, data)
    return text.removeprefix("::ffff:") if "." in text else text


def of_interfaces(node: str, nics: Sequence[str], direction: str) -> list[dict[str, str]]:
    """Return the interface counters of one direction at a node."""
    return [nic_counter(node, nic, direction) for nic in nics]


def counted_bps(run: Path, counter: Mapping[str, str], mtu: int | None, start_ns: int, end_ns: int) -> float:
    """Return the mean rate that a counter counted from the first to the last sample of a window, in bit/s.

    Args:
        run: job run directory.
        counter: ``node``, ``nic``, ``direction`` and, unless it is an interface counter, ``source``.
        mtu: MTU of its interface, for a node that recorded none; None: not known.
        start_ns: CLOCK_REALTIME.
        end_ns: likewise.

    Returns:
        The rate as frames on the wire.

    Raises:
        UsageError: the node has no samples of that time, or no MTU is known; the message names it.
    """
    log = CounterLog(run / "nodes" / counter["node"] / log_of(counter))
    times_ns = log.times_ns(start_ns, end_ns)
    if len(times_ns) < 2:
        raise UsageError(f"the counters of node {log.node} were not recorded in the window")
    size_bytes, _ = log.frame_bytes(counter, mtu, times_ns[0], times_ns[-1])
    return size_bytes * 8e9 / (times_ns[-1] - times_ns[0])


class Change(NamedTuple):
    """Change of the iterations of a window at one moment.

    Attributes:
        before_s: median iteration time before it.
        after_s: likewise after it.
        before_share: share of the bottleneck that was used before it.
        after_share: likewise after it.
    """

    before_s: float
    after_s: float
    before_share: float
    after_share: float

    def __str__(self) -> str:
        return (
            f"iterations changed from {self.before_s:.3g} to {self.after_s:.3g} s, and the used part of the bottleneck "
            f"from {self.before_share:.0%} to {self.after_share:.0%}"
        )

    def lasts(self, usual_s: float) -> bool:
        """Return True if iterations became longer, and still take that long rather than as long as before."""
        return self.after_s > self.before_s and usual_s**2 > self.before_s * self.after_s


def change_place(times_s: Sequence[float]) -> int | None:
    """Return the number of the first iteration after a clear change of their times; None: there is none.

    It is the place for which two means describe the logarithms of the times best, by least squares.
    """
    count = len(times_s)
    least = max(_CHANGE_ITERATIONS, round(_CHANGE_SHARE * count))
    if count < 2 * least:
        return None
    sums = list(accumulate((math.log(max(time_s, 1e-9)) for time_s in times_s), initial=0.0))
    mean = sums[-1] / count
    place = max(
        range(least, count - least + 1),
        key=lambda number: (sums[number] - number * mean) ** 2 / number / (count - number),
    )
    before_s, after_s = times_s[:place], sorted(times_s[place:])
    longer = sum(len(after_s) - (bisect_left(after_s, s) + bisect_right(after_s, s)) / 2 for s in before_s)
    share = longer / (place * (count - place))
    middle_s = median(before_s), median(after_s)
    is_clear = max(share, 1 - share) >= CHANGE_PAIRS and max(middle_s) >= (1 + _CHANGE_LONGER) * min(middle_s)
    return place if is_clear else None


class Watch:
    """Detector of disturbances in the windows of a series.

    Args:
        run: job run directory of the series.
        network: roles and addresses of the hosts.
        capacity_bps: capacity of the bottleneck.
        cross_port: TCP port of the cross traffic's receiver; 0 if there is none.
        has_one_bottleneck: the counters of all traffic are those of one bottleneck; otherwise each is that of a link.
    """

    def __init__(
        self, run: Path, network: SweepRoles, capacity_bps: int, cross_port: int, *, has_one_bottleneck: bool = True
    ) -> None:
        self._run, self._network, self._capacity_bps = run, network, capacity_bps
        counters = network.bottleneck["total"]
        self._links = [counters] if has_one_bottleneck else [[counter] for counter in counters]
        total = counters[0]
        self._bottleneck = (total["node"], total["direction"])
        cross_end = (network.cross.get(network.roles.cross_to, ""), cross_port)
        self._sockets = {
            node: ConnectionBytes(self._folder(node), port, cross_end, network.mtu)
            for node, port in network.attachments.items()
        }

    def _folder(self, node: str) -> Path:
        return self._run / "nodes" / node

    def other_bps(self, start_ns: int, end_ns: int) -> tuple[float | None, str]:
        """Return the other traffic at the bottleneck in a window; windows must be queried in order of time.

        Returns:
            Its rate in bit/s, as frames on the wire; or None, and the reason that it is not known, which is empty if
            there cannot be other traffic.
        """
        node, direction = self._bottleneck
        port = self._network.attachments.get(node)  # None for a testbed's switch
        if port is None or port.why:
            return None, port.why if port else ""
        try:
            rates = self.rates(node, start_ns, end_ns)
        except UsageError as error:
            return None, str(error)
        return max(0.0, rates.total[direction] - rates.own[direction]), ""

    def stall(self, ends_ns: Sequence[int]) -> list[str]:
        """Return a sentence about the longest iteration of a window, if it stalled for another reason than congestion.

        Args:
            ends_ns: ends of the window's iterations.
        """
        times_s = [(after - before) / 1e9 for before, after in pairwise(ends_ns)]
        if len(times_s) < 2:
            return []
        place = max(range(len(times_s)), key=times_s.__getitem__)
        usual_s, longest_s = median(times_s), times_s[place]
        if longest_s < STALL_ITERATIONS * usual_s or longest_s - usual_s < STALL_S:
            return []
        share = self.used(ends_ns[place], ends_ns[place + 1])
        if share is None or share >= STALL_LOAD:  # without counters, it cannot be told from congestion
            return []
        return [f"an iteration took {longest_s:.3g} s, usually {usual_s:.3g} s, with the bottleneck {share:.0%} used"]

    def change(self, ends_ns: Sequence[int]) -> Change | None:
        """Return the change of the iterations within a window that more traffic does not explain, if there is one.

        Args:
            ends_ns: ends of the window's iterations.
        """
        times_s = [(after - before) / 1e9 for before, after in pairwise(ends_ns)]
        place = change_place(times_s)
        if place is None:
            return None
        before_s, after_s = median(times_s[:place]), median(times_s[place:])
        before, after = self.used(ends_ns[0], ends_ns[place]), self.used(ends_ns[place], ends_ns[-1])
        if before is None or after is None:
            return None
        fast, slow = (before, after) if after_s > before_s else (after, before)
        return Change(before_s, after_s, before, after) if slow < CHANGE_CARRIED * fast else None

    def used(self, start_ns: int, end_ns: int) -> float | None:
        """Return the share of the bottleneck, or of the most used of several links, that was used; None: not known."""
        shares = []
        try:
            for link in self._links:
                total_bps = sum(
                    counted_bps(self._run, counter, self._network.mtu(counter), start_ns, end_ns) for counter in link
                )
                shares.append(total_bps / (link[0].get("rate_bps") or self._capacity_bps))
        except UsageError:
            return None
        return max(shares)

    def rates(self, node: str, start_ns: int, end_ns: int) -> PortRates:
        """Return the rates of a host's port in a window; windows must be queried in order of time.

        Raises:
            UsageError: they were not recorded.
        """
        return self._sockets[node].rates(start_ns, end_ns)

    def links(self, since_ns: int, end_ns: int, start_ns: int) -> Iterator[str]:
        """Yield a sentence for each link that lost its carrier or had frames with errors, and each clock that was set.

        Args:
            since_ns: start of the time in which changes of state count.
            end_ns: end of the time.
            start_ns: start of the time in which frames with errors, and clocks that are set, count.
        """
        for node, nics in self._network.links.items():
            log = read_json_lines(self._folder(node) / LINKS_JSONL, LINK_STATE)[0]
            counters = CounterLog(self._folder(node) / NIC_REC)
            if counters.file is not None:
                log = [
                    item | {"t_ns": item["mono_ns"] + counters.gap_ns} if "mono_ns" in item else item for item in log
                ]
            for nic in nics:
                yield from _link_words(node, nic, [item for item in log if item["nic"] == nic], since_ns, end_ns)
            try:
                for nic in nics:
                    yield from self._error_words(nic, counters, start_ns, end_ns)
                samples = zip(*counters.samples("t_ns", start_ns, end_ns), strict=True)
                step_ns = clock_set_ns([shown_ns - t_ns for t_ns, shown_ns in samples if start_ns <= t_ns <= end_ns])
                if abs(step_ns) > _DISTURBING_STEP_NS:
                    yield f"the clock of {node} was set by {format_change(step_ns / 1e9)}"
            except UsageError:  # such as a lost host, which is reported elsewhere
                continue

    def others(self, jobs: Sequence[tuple[Watch, Collection[str]]], start_ns: int, end_ns: int) -> list[str]:
        """Return a sentence for each host and direction with much traffic that is not the sweep's.

        Args:
            jobs: the watch of each job's run, and the hosts whose connections this run has recorded.
            start_ns: start of the window (CLOCK_REALTIME).
            end_ns: its end.
        """
        found = []
        for node, port in self._network.attachments.items():
            try:
                rates = [watch.rates(node, start_ns, end_ns) for watch, hosts in jobs if node in hosts and not port.why]
            except UsageError:  # no traffic, or no socket diagnostics there
                continue
            for direction in ("rx", "tx") if rates else ():
                total_bps = sum(rate.total[direction] for rate in rates) / len(rates)  # each run counted all of it
                rest_bps = total_bps - sum(rate.own[direction] for rate in rates)
                if rest_bps > MAX_OTHER_SHARE * self._capacity_bps:
                    found.append(other_words(node, direction, rest_bps, self._capacity_bps))
        return found

    def _error_words(self, nic: str, counters: CounterLog, start_ns: int, end_ns: int) -> Iterator[str]:
        for direction, verb in (("rx", "received"), ("tx", "sent")):
            errors, good = (
                counters.grown(f"{nic}.{direction}_{what}", start_ns, end_ns) for what in ("errors", "packets")
            )
            if isinstance(errors, str) or isinstance(good, str):
                continue
            if errors > MAX_ERROR_SHARE * (errors + good):
                yield f"{nic} of {counters.node} {verb} {counted(round(errors), 'frame')} with errors"


def _link_words(node: str, nic: str, log: list[dict[str, Any]], since_ns: int, end_ns: int) -> Iterator[str]:
    """Describe the changes of a link in at most one sentence; ``log`` is its part of links.jsonl."""
    earlier = [item for item in log if item["t_ns"] < since_ns]
    states = [*(earlier[-1:] or log[:1]), *(item for item in log[1:] if since_ns <= item["t_ns"] <= end_ns)]
    lost = next((item for item in states if not item["carrier"]), None)
    if lost is not None:
        back = next((item for item in log if item["t_ns"] > lost["t_ns"] and item["carrier"]), None)
        duration = f"for {(back['t_ns'] - lost['t_ns']) / 1e9:.1f} s" if back else "to the end of the window"
        yield f"{nic} of {node} had no link {duration}"
    elif states and states[-1]["carrier_changes"] != states[0]["carrier_changes"]:
        yield f"{nic} of {node} lost its link for a moment"


def other_words(node: str, direction: str, bps: float, capacity_bps: float) -> str:
    """Return a sentence about traffic that is not the sweep's."""
    verb = {"rx": "took in", "tx": "sent"}[direction]
    return f"{node} {verb} {format_rate(bps)} of other traffic ({bps / capacity_bps:.0%} of the capacity)"


_LATE_PERIODS = 1.5


def wait_for_samples(hosts: Hosts, run: Path, end_ns: int) -> None:
    """Wait until all hosts that record their interfaces have recorded them until the end of a window.

    Raises:
        MeasurementError: a host no longer records; the message names it.
    """
    logs, deadline_s = sorted(run.glob(f"nodes/*/{NIC_REC}")), time.monotonic() + _SILENT_S
    while True:
        hosts.gather(run)
        newest_ns = {log.parents[1].name: CounterLog(log).newest_ns for log in logs}
        missing = [node for node, last_ns in newest_ns.items() if last_ns < end_ns]
        if not missing:
            return
        if time.monotonic() > deadline_s:
            log = run / "nodes" / missing[0] / AGENT_LOG
            raise MeasurementError(
                f"{', '.join(missing)} recorded nothing up to the end of the window: did ringtap's agent end there? "
                f"See {log}, then resume"
            )
        time.sleep(RECORDED_S)


def late_share(log: Path, start_ns: int, end_ns: int) -> float:
    """Return the share of a recorder's samples within a window that came more than half a period late.

    Args:
        log: a nic.rec file, which may still grow.
        start_ns: start of the window (CLOCK_REALTIME).
        end_ns: its end.

    Returns:
        The share; 1 if the window has fewer than two samples.

    Raises:
        UsageError: the file does not give its sampling period.
    """
    counters = CounterLog(log)
    if counters.file is None:  # the file has not arrived from the host yet
        return 1.0
    if not counters.file.about.get("every_s"):
        raise UsageError(f"{log} cannot be used: it does not say how often it was sampled")
    period_ns = counters.file.about["every_s"] * 1e9
    gaps = [after - before for before, after in pairwise(counters.times_ns(start_ns, end_ns))]
    return sum(gap > _LATE_PERIODS * period_ns for gap in gaps) / len(gaps) if gaps else 1.0
