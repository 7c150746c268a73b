"""Reads the socket log of a node: its TCP connections, and the growth of their counters between samples."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.read_binary_records import Records
from ringtap.analysis.runs.samples_to_iterations import Integers, Numbers, counter_steps
from ringtap.core.append_only_logs import RecordFile
from ringtap.core.run_directory_schema import EVERY_S, NIC_REC, SOCKETS_REC
from ringtap.core.tcp_info import BUSY_TIMES, ENDED, LISTEN, STATES_WITHOUT_COUNTERS, UNKNOWN_RTT_US

# records read at a time, to bound memory on long runs
CHUNK_RECORDS = 1 << 20
BUSY = BUSY_TIMES[0]
COUNTERS = ("bytes_acked", "bytes_retrans", "bytes_received", "total_retrans", "delivered_ce", *BUSY_TIMES)
# segments that were sent again although the first one had not arrived, which follows from two counters
LOST, _AGAIN, _TWICE = "lost_segments", "total_retrans", "dsack_dups"
_LATE_DUMPS = 1.1  # times the planned period, from which their mean counts: each is up to half a sample early or late
_MAPPED = b"\0" * 10 + b"\xff\xff"


@dataclass(frozen=True)
class Growth:
    """Growth of the sockets in one chunk of records.

    Attributes:
        end: number of the socket of each growth, as in `SocketLog.sockets`.
        begin_ns: begin of each growth, CLOCK_REALTIME of the node.
        end_ns: end of each growth, by the same clock.
        amounts: growth of each of `COUNTERS`, by name, NaN where it was reset; and of `LOST`, NaN if the log does not
            have what it needs.
    """

    end: Integers
    begin_ns: Integers
    end_ns: Integers
    amounts: dict[str, Numbers]


class SocketLog:
    """A node's sockets/sockets.rec.

    Args:
        file: its header.
        records: its records.
        rounds_ns: times of the node's samples, from a log with one record per sample; None: not known.
        dump_s: mean time between samples of all connections; None: not known. It is longer than the header's where
            thousands of connections made a sample costly.

    Attributes:
        every_s: period of the samples.
        all_every_s: period of the samples that include connections with little traffic so far.
        sockets: one row per connection: ``cookie``, ``family``, ``local``, ``local_port``, ``remote``, ``remote_port``,
            ``inode``, ``first_ns``, ``last_ns``, ``closed``, ``rtt_us`` (median over its records; in a log of several
            chunks the median of the chunks' medians), ``min_rtt_us``.
    """

    def __init__(
        self, file: RecordFile, records: Records, rounds_ns: Integers | None = None, dump_s: float | None = None
    ) -> None:
        self._file, self._records = file, records
        self._rounds_ns = rounds_ns
        self.every_s = float(file.about.get("every_s") or EVERY_S)
        self._period_ns = round(self.every_s * 1e9)
        self.all_every_s = max(self.every_s, file.about.get("dump_every_s") or 0.0)
        if dump_s is not None and dump_s > _LATE_DUMPS * self.all_every_s:
            self.all_every_s = dump_s
        self._dump_ns = round(self.all_every_s * 1e9)
        busy_s = file.about.get("asked_by_name_s")
        self._busy_ns = round(busy_s * 1e9) if busy_s else np.iinfo(np.int64).max
        self._first_ns = int(records["t_ns"][0]) if len(records) else 0

    def __len__(self) -> int:
        return len(self._records)

    def _chunks(self) -> Iterator[Records]:
        for start in range(0, len(self._records), CHUNK_RECORDS):
            yield np.asarray(self._records[start : start + CHUNK_RECORDS])

    @cached_property
    def _seen(self) -> tuple[dict[str, npt.NDArray[Any]], Records]:
        """Values of each socket that was ever connected over its records, by cookie, and its first record."""
        parts, first = [], [np.asarray(self._records[:0])]
        for chunk in self._chunks():
            part, first_rows = _by_cookie(chunk)
            parts.append(part)
            first.append(chunk[first_rows])
        rows = np.concatenate(first)
        if len(parts) > 1:
            sums = {"inode": "max", "first_ns": "min", "last_ns": "max", "closed": "any", "connected": "any"}
            by_cookie = pd.concat(map(pd.DataFrame, parts)).groupby("cookie")
            joined = by_cookie.agg(sums | {"rtt_us": "median", "min_rtt_us": "min"}).reset_index()
            parts = [{str(name): joined[name].to_numpy() for name in joined}]
            rows = rows[np.unique(rows["cookie"], return_index=True)[1]]
        found = parts[0] if parts else _by_cookie(rows)[0]
        kept = found.pop("connected")
        return {name: values[kept] for name, values in found.items()}, rows[kept]

    @cached_property
    def sockets(self) -> pd.DataFrame:
        """Connections, one row each, by cookie."""
        found, first = self._seen
        return pd.DataFrame(_addresses(first) | found)

    def growth(self) -> Iterator[Growth]:
        """Yield the growth between successive records of each socket, one chunk of records at a time.

        A socket that is missing from a sample had not changed, so its growth began at the sample before its record. If
        the time of that sample is not known, growth after more than two periods is assigned to the last period.
        Connections with little traffic so far are not in every sample: their growth is assigned to the longer period
        at which all are sampled. Bytes from before the log began do not count; of a connection that opened later, all
        bytes count.
        """
        cookies = self._seen[0]["cookie"]
        if not len(cookies):
            return
        consecutive_ns = np.zeros(len(cookies), np.int64)
        samples = _Samples(self._first_ns, self._period_ns, self._rounds_ns)
        last_records = np.asarray(self._records[:0])
        for chunk in self._chunks():
            before = samples.before(np.asarray(chunk["t_ns"], np.int64))
            counted = ~np.isin(chunk["state"], STATES_WITHOUT_COUNTERS)
            joined = np.concatenate((last_records, chunk[counted]))
            before = np.concatenate((np.zeros(len(last_records), np.int64), before[counted]))
            end = np.minimum(np.searchsorted(cookies, joined["cookie"]), len(cookies) - 1)
            order = np.argsort(end, kind="stable")
            order = order[cookies[end[order]] == joined["cookie"][order]]
            if not len(order):
                continue
            joined, before, end = joined[order], before[order], end[order]
            yield self._grown(joined, before, end, consecutive_ns)
            last_records = joined[np.append(end[1:] != end[:-1], True)]

    def samples(self) -> Iterator[tuple[Integers, Records]]:
        """Yield the records of connected sockets with the numbers of their sockets, one chunk of records at a time."""
        cookies = self._seen[0]["cookie"]
        for chunk in self._chunks():
            end = np.searchsorted(cookies, chunk["cookie"])
            known = (end < len(cookies)) & ~np.isin(chunk["state"], STATES_WITHOUT_COUNTERS)
            known[known] = cookies[end[known]] == chunk["cookie"][known]
            yield end[known], chunk[known]

    def _grown(self, joined: Records, before: Integers, end: Integers, consecutive_ns: Integers) -> Growth:
        """Return the differences of records sorted by socket and time; ``before`` is 0 for those of an earlier chunk.

        ``consecutive_ns`` has the last time at which each socket was in two samples in a row, and is updated.
        """
        t_ns = np.asarray(joined["t_ns"], np.int64)
        follows = np.append(False, end[1:] == end[:-1])
        # a socket's first record: history if the log begins with it, else growth since the previous sample
        fresh = ~follows & (before > 0) & (t_ns > self._first_ns + self._period_ns // 2)
        rows = np.flatnonzero(follows | fresh)
        at_ns, own_before = t_ns[rows], np.where(follows[rows], t_ns[rows - 1], 0)
        begin = np.maximum(before[rows], own_before)
        if self._rounds_ns is None:
            begin = np.where(at_ns - begin > 2 * self._period_ns, at_ns - self._period_ns, begin)
        if self._dump_ns > self._period_ns:
            since_ns = _last_before(end[rows], at_ns, at_ns - own_before <= self._dump_ns // 2, consecutive_ns)
            dumped_only = (at_ns - own_before > self._dump_ns // 2) & (
                (since_ns == 0) | (at_ns - since_ns > self._busy_ns)
            )
            begin = np.where(dumped_only, np.maximum(own_before, at_ns - self._dump_ns), begin)
        begin = np.minimum(begin, at_ns - 1)
        amounts = {}
        for name in COUNTERS:
            values = np.asarray(joined[name])
            before = np.where(follows[rows], values[rows - 1], 0).astype(values.dtype)
            amounts[name] = counter_steps(before, values[rows], self._file.column(name).wraps_at_bits)
        amounts[LOST] = np.full(len(rows), np.nan)
        if _TWICE in (joined.dtype.names or ()):
            lost = _lost(joined, end)
            amounts[LOST] = np.maximum(lost[rows] - np.where(follows[rows], lost[rows - 1], 0.0), 0.0)
        return Growth(end[rows], begin, at_ns, amounts)


def _lost(records: Records, end: Integers) -> Numbers:
    """Return how many segments each socket had lost at each record; records are sorted by socket and time.

    A segment that is sent again counts as lost unless the receiver reports later that it had arrived twice (DSACK).
    """
    again, twice = (np.asarray(records[name], np.float64) for name in (_AGAIN, _TWICE))
    open_ = again - twice
    # the least value from here on, of this socket alone: those of later sockets are raised above it
    apart = (np.ptp(open_) + 1 if len(open_) else 1.0) * end
    least: Numbers = np.minimum.accumulate((open_ + apart)[::-1])[::-1] - apart
    return least


def _by_cookie(chunk: Records) -> tuple[dict[str, npt.NDArray[Any]], Integers]:
    """Summarize the records of each socket in a chunk, by cookie, and return the position of its first record."""
    cookies, first_rows, socket_of = np.unique(np.asarray(chunk["cookie"]), return_index=True, return_inverse=True)
    order = np.argsort(socket_of, kind="stable")
    begins = np.searchsorted(socket_of[order], np.arange(len(cookies)))
    state, t_ns = np.asarray(chunk["state"])[order], np.asarray(chunk["t_ns"])[order]
    table = {
        "cookie": cookies,
        "inode": np.maximum.reduceat(np.asarray(chunk["inode"])[order], begins),
        "first_ns": np.minimum.reduceat(t_ns, begins),
        "last_ns": np.maximum.reduceat(t_ns, begins),
        "closed": np.logical_or.reduceat(state == ENDED, begins),
        "connected": np.logical_or.reduceat(~np.isin(state, (LISTEN, ENDED)), begins),
    }
    ranked, known = _ranked(chunk["rtt_us"], socket_of, begins)
    table["rtt_us"] = (ranked[begins + np.maximum(known - 1, 0) // 2] + ranked[begins + known // 2]) / 2  # median
    table["min_rtt_us"] = _ranked(chunk["min_rtt_us"], socket_of, begins)[0][begins]
    return table, first_rows


def _ranked(values: npt.NDArray[Any], group: Integers, begins: Integers) -> tuple[Numbers, Integers]:
    """Sort round-trip times by group and size, unknown ones (NaN) last, and count the known ones of each group."""
    times = np.asarray(values, np.float64)
    times = np.where((times > 0) & (times < UNKNOWN_RTT_US), times, np.nan)
    ranked: Numbers = times[np.lexsort((times, group))]
    return ranked, np.add.reduceat(~np.isnan(ranked), begins, dtype=np.int64)


def _last_before(group: Integers, at_ns: Integers, marked: npt.NDArray[np.bool_], last_ns: Integers) -> Integers:
    """Return for each row the time of the last marked row before it in its group; rows are sorted by group, then time.

    ``last_ns`` has the time of each group's last marked row before these, 0 for none, and is updated.
    """
    marks = np.maximum.accumulate(np.where(marked, np.arange(len(group)), -1))
    before = np.append(-1, marks)[:-1]
    same = (before >= 0) & (group[before] == group)
    found: Integers = np.where(same, at_ns[before], last_ns[group])
    np.maximum.at(last_ns, group[marked], at_ns[marked])
    return found


class _Samples:
    """Times of the sample before each record's own, over chunks that may split a sample."""

    def __init__(self, first_ns: int, period_ns: int, rounds_ns: Integers | None) -> None:
        self._gap_ns = period_ns // 4  # smaller gaps are within one sample
        self._before_ns = self._last_ns = first_ns
        self._rounds_ns = rounds_ns

    def before(self, t_ns: Integers) -> Integers:
        """Return for each record of the next chunk the last time of the sample before its own."""
        times = np.unique(np.append(t_ns, self._last_ns))
        starts = np.flatnonzero(np.append(False, np.diff(times) > self._gap_ns))
        sample = np.searchsorted(starts, np.arange(len(times)), side="right")
        times_before = np.append(self._before_ns, times[starts - 1])
        self._before_ns, self._last_ns = int(times_before[sample[-1]]), int(times[-1])
        found: Integers = times_before[sample][np.searchsorted(times, t_ns)]
        if self._rounds_ns is None:
            return found
        before = np.searchsorted(self._rounds_ns, t_ns - self._gap_ns) - 1
        return np.maximum(found, np.where(before < 0, 0, self._rounds_ns[before]))


def _addresses(rows: Records) -> dict[str, Any]:
    """Return the addresses and ports of sockets, addresses as text."""
    family = np.asarray(rows["family"])
    table: dict[str, Any] = {"cookie": np.asarray(rows["cookie"]), "family": family}
    for side, address, port in (("local", "source", "sport"), ("remote", "destination", "dport")):
        table[side] = _texts(rows[address], family)
        table[f"{side}_port"] = np.ascontiguousarray(rows[port]).view(">u2").astype(np.int64)
    return table


def _texts(addresses: npt.NDArray[Any], family: npt.NDArray[Any]) -> list[str]:
    raw = np.ascontiguousarray(addresses).tobytes()
    keys = [(int(kind), raw[start : start + 16]) for kind, start in zip(family, range(0, len(raw), 16), strict=True)]
    names = {key: address_text(*key) for key in set(keys)}
    return [names[key] for key in keys]


def address_text(family: int, raw: bytes) -> str:
    """Return the address of a socket as text; IPv4 addresses that IPv6 maps as IPv4."""
    if family == socket.AF_INET6 and not raw.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET6, raw)
    return socket.inet_ntop(socket.AF_INET, raw[12:] if family == socket.AF_INET6 else raw[:4])


def socket_log(logs: NodeLogs) -> SocketLog | None:
    """Return a node's socket log; None if it has none or lacks columns."""
    found = logs.records(SOCKETS_REC)
    if found is None:
        return None
    lacking = {*COUNTERS, "cookie", "inode", "source", "destination"} - {field.name for field in found[0].fields}
    if lacking:
        logs.report(f"{logs.name}/sockets/sockets.rec lacks {', '.join(sorted(lacking))}")
        return None
    return SocketLog(*found, _rounds(logs, found[0]), _mean_dump_s(logs))


def _rounds(logs: NodeLogs, file: RecordFile) -> Integers | None:
    """Return the times of the samples by the interface log, which has a record of each; None if its period differs."""
    counters, every_s = logs.wide(NIC_REC), file.about.get("every_s")
    if counters is None or every_s is None or counters.file.about.get("every_s") != every_s:
        return None
    return counters.t_ns


def _mean_dump_s(logs: NodeLogs) -> float | None:
    """Return the mean time between samples of all connections; None if node.json does not have what it needs."""
    facts = logs.collectors.get("sockets", {})
    samples, every_s = facts.get("samples"), facts.get("every_s")
    all_read = facts.get("all_read") or facts.get("dumps")  # in older runs, all were read by dumps alone
    if not (samples and all_read and every_s):
        return None
    return float(every_s * (samples + (facts.get("missed_samples") or 0)) / all_read)
