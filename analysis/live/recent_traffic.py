"""Keeps the payload and the lost segments of a node's sockets over the last minutes, of the training and of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringtap.analysis.live.flows import NOBODY, Owners, address_of, port_class, traffic_of
from ringtap.analysis.runs.growing_files import Record
from ringtap.analysis.runs.traffic_classes import TRAINING
from ringtap.core.append_only_logs import RecordFile
from ringtap.core.tcp_info import BUSY_TIMES, ENDED, STATES_WITHOUT_COUNTERS

_MAX_GROWTHS = 16_000
_MAX_SOCKETS = 10_000
_MAX_LOSSES = 1_000  # of a socket
_MAX_BUSY = 128  # points of a socket; above, every second one is dropped
_BUSY_EVERY_NS = 5 * 10**8
_LONG_S = 1e6
# the owner of a new socket is known after this time at the latest
_OWNER_NS = 3 * 10**9


class FlowGrowth(NamedTuple):
    """Payload of a flow from one sample to the next.

    Attributes:
        begin_ns, end_ns: the times of the samples on the reference clock.
        ends: ends of the flow.
        payload_bytes: without retransmissions.
    """

    begin_ns: int
    end_ns: int
    ends: FlowEnds
    payload_bytes: int


class BusyTimes(NamedTuple):
    """Times for which a socket had data to send so far, and for which full buffers limited it.

    Attributes:
        at_ns: the time on the reference clock.
        busy_us: time with data to send.
        by_receiver_us, by_sender_us: time in which the receiver's, or its own, full buffer limited it.
    """

    at_ns: int
    busy_us: int
    by_receiver_us: int
    by_sender_us: int


class FlowEnds(NamedTuple):
    """Addresses of a flow, and whether it is of the training."""

    source: str
    destination: str
    is_training: bool


@dataclass
class _Socket:
    """A socket that was seen.

    Attributes:
        local, remote: its addresses.
        is_loopback: True if one of them is a loopback address.
        ports: the traffic that its ports stand for; empty if they stand for none.
        first_ns: CLOCK_MONOTONIC of its first record.
        last_ns: the same of its newest record; 0 for a socket that opened after reading began.
        in_a_row_ns: the last time at which it was in two samples in a row; 0: never.
        counts: bytes acknowledged and bytes received at its newest record.
        lost: segments that were sent again and had not arrived twice so far, at each record that changed it.
        busy: its busy times when it was seen to have sent, the newest last.
    """

    local: str
    remote: str
    is_loopback: bool
    inode: int
    ports: str
    first_ns: int
    last_ns: int
    in_a_row_ns: int
    counts: tuple[int, int]
    lost: deque[tuple[int, int]]
    busy: list[BusyTimes]

    def has_sent(self, times: BusyTimes) -> None:
        """Note its busy times when it has sent something."""
        if len(self.busy) > 1 and times.at_ns - self.busy[-2].at_ns < _BUSY_EVERY_NS:
            self.busy.pop()
        elif len(self.busy) >= _MAX_BUSY:
            del self.busy[1:-1:2]
        self.busy.append(times)

    def seen(self, now_ns: int, every_ns: int, dump_ns: int, busy_ns: int) -> int:
        """Note a record, and return when the growth before it began.

        What was not in the sample before had not changed; a socket with little traffic so far is in few samples.

        Args:
            now_ns: CLOCK_MONOTONIC of the record, as all times.
            every_ns: period of the samples.
            dump_ns: period of the samples that include sockets with little traffic so far.
            busy_ns: time for which a socket that was in two samples in a row is in each sample.
        """
        gap_ns, last_ns, self.last_ns = now_ns - self.last_ns, self.last_ns, now_ns
        if gap_ns <= dump_ns // 2:
            self.in_a_row_ns = now_ns
        is_rare = gap_ns > dump_ns // 2 and (self.in_a_row_ns == 0 or now_ns - self.in_a_row_ns > busy_ns)
        period_ns = dump_ns if is_rare else every_ns if gap_ns > 2 * every_ns else gap_ns
        return max(last_ns, now_ns - max(period_ns, 1))

    def stays_on(self, node: str, node_of: Mapping[str, str]) -> bool:
        """Return True if both ends are on its node."""
        return self.is_loopback or self.local == self.remote or node_of.get(self.remote) == node


class RecentTraffic:
    """Traffic of a node's sockets that crosses the network, by the clock of the reference node.

    The kind of traffic is by the socket's owner on this node, else by its ports.

    Args:
        owners: owners of the sockets.
        to_reference: converts CLOCK_REALTIME and CLOCK_MONOTONIC of the node to the reference node's clock.

    Attributes:
        every_s: period of the samples; 0 before the first.
        all_every_s: period of the samples that include sockets with little traffic so far.
        tells_losses: True if the log tells lost segments from delayed ones.
        growths: what the flows carried, the newest last.
        begin_ns: time from which on the traffic is known; None: not yet.
    """

    def __init__(self, owners: Owners, to_reference: Callable[[int, int], int]) -> None:
        self._owners, self._to_reference = owners, to_reference
        self.every_s = self.all_every_s = 0.0
        self.tells_losses = True
        self._new_after_ns: int | None = None  # CLOCK_MONOTONIC; None: none is new
        self._sockets: dict[int, _Socket] = {}
        self._ended: deque[_Socket] = deque(maxlen=_MAX_SOCKETS)
        self._waiting: list[tuple[int, int, int, _Socket, int, int]] = []
        self.growths: deque[FlowGrowth] = deque(maxlen=_MAX_GROWTHS)
        self.begin_ns: int | None = None

    def feed(self, file: RecordFile, batch: Sequence[Record], is_begun: bool) -> None:
        """Add records.

        Args:
            file: header of their log.
            batch: the records.
            is_begun: True if earlier records of the log were not read.
        """
        at = file.index
        t, mono, cookie, state = (at[name] for name in ("t_ns", "mono_ns", "cookie", "state"))
        sent, received, again = (at[name] for name in ("bytes_acked", "bytes_received", "total_retrans"))
        limits = [at[name] for name in BUSY_TIMES if name in at]
        twice = at.get("dsack_dups")
        self.tells_losses = twice is not None
        self.every_s = float(file.about.get("every_s") or 0)
        self.all_every_s = max(self.every_s, float(file.about.get("dump_every_s") or 0))
        busy_s = file.about.get("asked_by_name_s")
        seconds = self.every_s, self.all_every_s, float(busy_s) if busy_s else float("inf")
        periods_ns = [round(min(period_s, _LONG_S) * 1e9) for period_s in seconds]
        if self.begin_ns is None:
            self.begin_ns = self._to_reference(batch[0][t], batch[0][mono])
            # an old socket that had no traffic at first is not new where the log is not read from its beginning
            self._new_after_ns = None if is_begun else batch[0][mono]
        for record in batch:
            now_ns, counts = record[mono], (record[sent], record[received])
            socket, is_new = self._sockets.get(record[cookie]), self._is_new(now_ns)
            if record[state] in STATES_WITHOUT_COUNTERS:
                if record[state] == ENDED and socket is not None:
                    self._ended.append(self._sockets.pop(record[cookie]))
                continue
            if socket is None:
                if len(self._sockets) >= _MAX_SOCKETS:
                    continue
                socket = _opened(record, at, now_ns, None if is_new else counts)
                self._sockets[record[cookie]] = socket
            begin_ns = socket.seen(now_ns, *periods_ns)
            grown = [max(after - before, 0) for after, before in zip(counts, socket.counts, strict=True)]
            socket.counts = counts
            if grown[0] and len(limits) == len(BUSY_TIMES):
                at_ns = self._to_reference(record[t], now_ns)
                socket.has_sent(BusyTimes(at_ns, *(record[number] for number in limits)))
            if any(grown):
                self._waiting.append((record[t], now_ns, max(now_ns - begin_ns, 1), socket, *grown))
            lost = record[again] - (record[twice] if twice is not None else 0)
            if not socket.lost:  # a socket that was there when reading began may have lost some before
                socket.lost.append((now_ns, 0 if is_new else lost))
            if lost != socket.lost[-1][1]:
                socket.lost.append((self._to_reference(record[t], now_ns), lost))

    def _is_new(self, first_ns: int) -> bool:
        """Return True for a socket whose first record is of this time if it opened during the recording."""
        return self._new_after_ns is not None and first_ns > self._new_after_ns

    def commit(self, now: tuple[int, int], node_of: Mapping[str, str], node: str) -> None:
        """Add up what was read.

        Args:
            now: CLOCK_REALTIME and CLOCK_MONOTONIC of the newest sample of any collector of the node.
            node_of: the nodes of the run by their addresses.
            node: this node.
        """
        later: list[tuple[int, int, int, _Socket, int, int]] = []
        for item in self._waiting:
            t_ns, mono_ns, length_ns, socket, sent, received = item
            owner = self._owners.of(socket.inode)
            if owner is NOBODY and not socket.ports and now[1] - socket.first_ns < _OWNER_NS:
                later.append(item)
            elif not socket.stays_on(node, node_of):
                end_ns = self._to_reference(t_ns, mono_ns)
                span = end_ns - length_ns, end_ns
                is_training = traffic_of(owner, NOBODY, socket.ports) == TRAINING
                self._count(*span, FlowEnds(socket.local, socket.remote, is_training), sent)
                if socket.remote not in node_of:  # what it received is recorded nowhere else
                    self._count(*span, FlowEnds(socket.remote, socket.local, is_training), received)
        self._waiting = later

    def _count(self, begin_ns: int, end_ns: int, ends: FlowEnds, payload_bytes: int) -> None:
        if payload_bytes:
            if len(self.growths) == _MAX_GROWTHS:
                self.begin_ns = max(self.begin_ns or 0, self.growths[0].end_ns)
            self.growths.append(FlowGrowth(begin_ns, end_ns, ends, payload_bytes))

    def losses(self, node_of: Mapping[str, str], node: str) -> list[tuple[FlowEnds, list[tuple[int, int]]]]:
        """Return the losses of the training's sockets: their ends, and times and numbers of the segments lost."""
        found = []
        for socket in self._of_training(node_of, node):
            if len(socket.lost) < 2:
                continue
            counts, least = [], socket.lost[-1][1]
            # a segment counts as lost unless the receiver reports later that it had arrived twice (DSACK)
            for at_ns, lost in reversed(socket.lost):
                least = min(least, lost)
                counts.append((at_ns, least))
            steps, (_, before) = [], counts[-1]
            for at_ns, lost in reversed(counts):
                if lost > before:
                    steps.append((at_ns, lost - before))
                before = max(before, lost)
            found.append((FlowEnds(socket.local, socket.remote, True), steps))
        return found

    def busy_times(self, node_of: Mapping[str, str], node: str) -> list[tuple[FlowEnds, list[BusyTimes]]]:
        """Return the busy times of the training's sockets that have sent in two samples or more."""
        sockets = (socket for socket in self._of_training(node_of, node) if len(socket.busy) > 1)
        return [(FlowEnds(socket.local, socket.remote, True), socket.busy) for socket in sockets]

    def _of_training(self, node_of: Mapping[str, str], node: str) -> Iterator[_Socket]:
        """Yield the training's sockets that cross the network."""
        for socket in (*self._sockets.values(), *self._ended):
            owner = self._owners.of(socket.inode)
            if not socket.stays_on(node, node_of) and traffic_of(owner, NOBODY, socket.ports) == TRAINING:
                yield socket


def _opened(record: Record, at: Mapping[str, int], now_ns: int, counts: tuple[int, int] | None) -> _Socket:
    """Return a socket at its first record; ``counts`` are those that are not counted, None if it is new."""
    local, remote = (address_of(record[at["family"]], record[at[name]]) for name in ("source", "destination"))
    ports = port_class(record[at["sport"]], record[at["dport"]])
    is_loopback = local.is_loopback or remote.is_loopback
    lost: deque[tuple[int, int]] = deque(maxlen=_MAX_LOSSES)
    inode, last_ns = record[at["inode"]], 0 if counts is None else now_ns
    return _Socket(str(local), str(remote), is_loopback, inode, ports, now_ns, last_ns, 0, counts or (0, 0), lost, [])
