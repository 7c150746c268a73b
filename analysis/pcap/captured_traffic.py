"""Presents the traffic of captures in Python: conversations, flows, rates, the traffic matrix."""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.notebook_formatting import as_time_ns, by_name, documented
from ringtap.analysis.pcap import export_scan_tables
from ringtap.analysis.pcap.scan import Scanned
from ringtap.analysis.pcap.scan_dtypes import is_ip
from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.units import counted, duration_s, format_duration

if TYPE_CHECKING:
    import pandas as pd

    from ringtap.analysis.pcap.single_packets import CapturedPackets

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Cells = npt.NDArray[Any]
_Batches = Sequence[Callable[[], Cells]]

AMOUNTS = ("bytes", "payload", "data_bytes", "packets", "data_packets")
"""Amounts counted by flow and bin: frame bytes on the wire, transport payload, frame bytes of packets with payload,
packets, packets with payload."""
GROUPS = ("conversation", "flow", "hosts", "total")

_CHUNK = 1 << 18  # cells processed together
_TOGETHER = 1 << 18  # approximate number of cells whose rates are computed together
_SHORT_BIN_NS = 1_000_000_000  # longer ones are refused for shorter captures
_MAX_BINS = 1 << 27
MAX_TRAINING_BINS = 1 << 24
"""Maximum number of bins in which training is searched for: 4.6 hours in bins of 1 ms."""
_MAX_HOSTS = 4096
_SHOWN = 5  # conversations in a notebook
_MAX_FILLED = 20_000_000  # rows of a table of rates with all bins
_MATRIX_AMOUNTS = (*AMOUNTS, "segments", "retransmitted_bytes", "out_of_order_bytes")
_CONVERSATION_COLUMNS = {
    "conversation": "number of the conversation, also the index",
    "protocol": "tcp, udp, roce, icmp, icmp6, or ip-<number>",
    "a, a_port": "the endpoint that sent the first packet",
    "b, b_port": "the other endpoint",
    "packets_ab, packets_ba": "packets of this direction",
    "bytes_ab, bytes_ba": "frame bytes on the wire",
    "payload_ab, payload_ba": "transport payload",
    "first_ns, last_ns": "times of the first and the last packet",
    "data_packets_ab, data_packets_ba": "packets with payload",
    "data_bytes_ab, data_bytes_ba": "frame bytes of packets with payload",
    "segments_ab, segments_ba": "segments on the wire",
    "retransmitted_bytes_ab, retransmitted_bytes_ba": "payload that was sent again",
    "repeated_bytes_ab, repeated_bytes_ba": "payload that an earlier packet held, too",
    "out_of_order_bytes_ab, out_of_order_bytes_ba": "payload that came late",
    "zero_windows_ab, zero_windows_ba": "packets that announced a window of 0",
    "resets_ab, resets_ba": "packets with RST",
    "rtt_count_ab, rtt_count_ba": "round-trip times measured",
    "rtt_mean_ns_ab, rtt_mean_ns_ba, rtt_min_ns_ab, rtt_min_ns_ba": "from data of that direction to its "
    "acknowledgement, at the capture point; NA if none was measured",
    "handshake_ns": "length of the handshake; NA if it was not captured",
    "inner": "True inside a tunnel",
}


class Traffic:
    """The traffic of captures, or the part of it that a filter accepts.

    A **conversation** is a pair of endpoints and a protocol; ``a`` is the endpoint that sent the first packet.
    A **flow** is one direction of a conversation: flow ``2 * row`` goes from ``a`` to ``b``, flow ``2 * row + 1`` from
    ``b`` to ``a``. Conversations inside VXLAN (``inner``) are listed beside those of the tunnel; sums omit them
    unless a filter asks for them. ARP, and the row of all other non-IP frames, count only if a filter accepts them.

    Attributes:
        scanned: the unfiltered tables of the scan.
        files: names of the captures.
        leads_ns: lead of each capture's clock, which was subtracted from its times.
        start_ns: beginning of bin 0 since the epoch, by the capturing host's clock; a multiple of ``bin_ns``.
        bin_ns: width of a bin.
        bins: number of bins from the first packet's to the last packet's; 0 if no packet has a time.
        duration_s: time from the first packet to the last; 0 if no packet has a time.
        counts: number of packets, frame bytes and anomalies, by name; over all packets, filtered or not.
        selected: mask of the flows that count, shape (2 * conversations,).
        left_out: a sentence for each directory or glob of which something was not read.
    """

    def __init__(
        self,
        scanned: Scanned,
        files: Sequence[str] = (),
        selected: npt.NDArray[np.bool_] | None = None,
        leads_ns: Sequence[int] = (),
        left_out: Sequence[str] = (),
    ) -> None:
        self.scanned = scanned
        self.files = tuple(files)
        self.left_out = tuple(left_out)
        self.leads_ns = tuple(leads_ns) or (0,) * len(files)
        self.start_ns, self.bin_ns = scanned.start_ns, scanned.bin_ns
        self._is_timed = scanned.last_ns >= scanned.first_ns >= 0
        self.bins = (scanned.last_ns - scanned.start_ns) // scanned.bin_ns + 1 if self._is_timed else 0
        self.duration_s = (scanned.last_ns - scanned.first_ns) / 1e9 if self._is_timed else 0.0
        self.counts = scanned.counts
        self._is_filtered = selected is not None
        self.selected = np.repeat(is_ip(scanned.conversations["kind"]), 2) if selected is None else selected

    def __repr__(self) -> str:
        shown = f"{counted(len(self.rows), 'conversation')} of {', '.join(self.files[:3]) or 'no file'}"
        return f"<Traffic: {shown}, {format_duration(self.duration_s)}>"

    def _repr_html_(self) -> str:
        table = self.conversations()
        largest = table.assign(payload=table["payload_ab"] + table["payload_ba"]).nlargest(_SHOWN, "payload")
        columns = ["conversation", "protocol", "a", "a_port", "b", "b_port", "packets_ab", "packets_ba", "payload"]
        shown = largest[columns].to_html(index=False, na_rep="–", border=0)
        return f"<p>{html.escape(repr(self)[1:-1])}; with most payload:</p>{shown}"

    @property
    def rows(self) -> Integers:
        """Rows of ``scanned.conversations`` of which at least one direction counts."""
        return np.flatnonzero(self.selected.reshape(-1, 2).any(1))

    @property
    def flow_numbers(self) -> Integers:
        """Numbers of the flows that count and have packets; flows inside tunnels only if no outer flow counts."""
        conversations = self.scanned.conversations
        layer = np.repeat(conversations["layer"], 2)
        mine = self.selected & (conversations["packets"].reshape(-1) > 0)
        outer = mine & (layer == 0)
        return np.flatnonzero(outer if outer.any() else mine)

    @documented(_CONVERSATION_COLUMNS)
    def conversations(self) -> pd.DataFrame:
        """Conversations, in the order of their first packets.

        Returns:
            One row per conversation. Directions that a filter left out count 0.
        """
        rows = self.rows
        return _frame(self._conversation_columns(rows), rows)

    def _conversation_columns(self, rows: Integers) -> export_scan_tables.Columns:
        selected = self.selected.reshape(-1, 2)[rows].reshape(-1)
        return {"conversation": rows} | export_scan_tables.conversation_columns(
            self.scanned.conversations[rows], selected
        )

    def conversation_batches(self, size: int = 50_000) -> Iterator[export_scan_tables.Columns]:
        """Yield the columns of `conversations`, some rows at a time, without pandas."""
        rows = self.rows
        for at in range(0, len(rows), size):
            yield self._conversation_columns(rows[at : at + size])

    @documented(
        {
            "flow": "number of the flow, also the index",
            "conversation": "number of its conversation",
            "protocol": "as in `conversations`",
            "source, source_port, destination, destination_port": "endpoints",
        }
    )
    def flows(self) -> pd.DataFrame:
        """Flows that count and have packets.

        Returns:
            One row per direction of a conversation.

            The others are those of one direction in `conversations`; ``first_ns`` and ``last_ns`` are those of the
            conversation.
        """
        numbers = np.flatnonzero(self.selected & (self.scanned.conversations["packets"].reshape(-1) > 0))
        keys = {"flow": numbers, "conversation": numbers // 2}
        table = _frame(keys | export_scan_tables.flow_columns(self.scanned.conversations, numbers), numbers)
        of_conversations = by_name(_CONVERSATION_COLUMNS)
        table.attrs["columns"] = {name.removesuffix("_ab"): text for name, text in of_conversations.items()}
        return table

    @documented(
        {
            "source, destination": "addresses",
            "queue_pair": "number of the destination's queue pair",
            "packets, bytes, payload": "packets, frame bytes on the wire, payload",
            "acknowledgements, naks, cnps": "packets that acknowledge, that refuse, and congestion notifications",
            "psn_gaps, psn_repeats": "packet numbers that were left out or came again",
            "first_ns, last_ns": "times of the first and the last packet",
        }
    )
    def queue_pairs(self) -> pd.DataFrame:
        """RoCE queue pairs; over all packets, filtered or not.

        Returns:
            One row per source, destination and queue pair of the destination.
        """
        return _frame(export_scan_tables.queue_pair_columns(self.scanned.queue_pairs), None)

    def select(self, words: str) -> Traffic:
        """Return the flows that a filter accepts, without reading the captures again.

        Args:
            words: a filter in tcpdump's language: ``host``, ``net``, ``port``, ``portrange``, ``proto``, with ``src``
                and ``dst``; ``tcp``, ``udp``, ``icmp``, ``icmp6``, ``ip``, ``ip6``, and ``roce``; ``and``, ``or``,
                ``not``, parentheses. Each direction is matched on its own. ``vxlan and …`` matches inside tunnels.

        Raises:
            UsageError: the filter is wrong, needs single packets, or matches no packet; in that case, the message names
                the largest conversations.
        """
        from ringtap.analysis.pcap import flow_filter

        found = flow_filter.matches(words, self.scanned.conversations)
        if self._is_filtered:
            found &= self.selected
        chosen = Traffic(self.scanned, self.files, found, self.leads_ns, self.left_out)
        if not len(chosen.flow_numbers):
            raise UsageError(f"no packet matches {words!r}: {self._largest()}")
        return chosen

    def _largest(self) -> str:
        rows = self.scanned.conversations[self.rows]
        order = np.argsort(-rows["bytes"].sum(1).astype(np.int64), kind="stable")[:3]
        shown = export_scan_tables.conversation_columns(rows[order])
        most = ", ".join(
            f"{item['protocol']} {endpoint(item['a'], item['a_port'])} - {endpoint(item['b'], item['b_port'])}"
            for item in export_scan_tables.rows_of(shown)
        )
        return (
            f"the largest of {counted(len(rows), 'conversation')}: {most}"
            if len(rows)
            else no_conversations(self.counts)
        )

    def binned(self, flows: Sequence[int] | Integers | None = None, what: str = "payload") -> Integers:
        """Sum an amount of flows in each bin.

        Args:
            flows: flow numbers; None for all that count, outside tunnels.
            what: one of `AMOUNTS`.

        Returns:
            Shape (bins,); bin ``i`` begins at ``start_ns + i * bin_ns``.

        Raises:
            UsageError: no such flow or amount, or more bins than memory should hold.
        """
        _check_amount(what, AMOUNTS)
        group = self._group_of(self.flow_numbers if flows is None else flows)
        total = np.zeros(self._checked_bins(), np.int64)
        for read in self._batches():
            cells = read()
            mine = cells[group[cells["flow"]] >= 0]
            total += np.rint(np.bincount(mine["bin"], mine[what], len(total))).astype(np.int64)
        return total

    def _group_of(self, flows: Sequence[int] | Integers) -> Integers:
        """Return, for each flow of the scan, 0 if it is among these, else -1."""
        try:
            numbers = np.asarray(flows, np.int64).reshape(-1)
        except (TypeError, ValueError):
            raise UsageError(f"{flows!r} are not numbers of flows: take those of Traffic.flows()") from None
        count = 2 * len(self.scanned.conversations)
        if len(numbers) and (numbers.min() < 0 or numbers.max() >= count):
            raise UsageError(f"there is no flow {int(numbers.max())}: the flows are 0 to {count - 1}")
        group = np.full(count, -1, np.int64)
        group[numbers] = 0
        return group

    def _batches(self) -> _Batches:
        """Return functions that read the cells in batches, because they may not fit in memory."""
        number = len(self.scanned.cells)
        if number and not self._is_timed:
            raise UsageError("no packet of the capture has a time: there are no rates")
        return [partial(self._read_cells, at) for at in range(0, number, _CHUNK)]

    def _read_cells(self, at: int) -> Cells:
        part, flows, bins = self.scanned.cells[at : at + _CHUNK], 2 * len(self.scanned.conversations), self.bins
        most = int(part["bin"].max())
        if part["flow"].max() >= flows or most > bins or part["bin"].min() < 0:
            raise UsageError("the cache of a capture is damaged: read it with --no-cache, or cache=False")
        if most == bins:  # rounding may add a bin when clocks are aligned
            part = part.copy()
            part["bin"] = np.minimum(part["bin"], bins - 1)
        return part

    @documented(
        {
            "t_ns": "beginning of the bin",
            "conversation, flow": "number, as in `conversations` and `flows`",
            "protocol": "as in `conversations`",
            "a, a_port, b, b_port": "endpoints of a conversation",
            "source, source_port, destination, destination_port": "endpoints of a flow",
            "rate_bps": "bits of the bin over its width",
            "rate_pps": "packets of the bin over its width",
        }
    )
    def rates(
        self, by: str = "flow", what: str = "bytes", bin_s: float | str | None = None, *, fill: bool = False
    ) -> pd.DataFrame:
        """Rates over time.

        Args:
            by: ``conversation`` (both directions), ``flow``, ``hosts`` (source and destination address) or ``total``.
            what: one of `AMOUNTS`.
            bin_s: width of the bins in seconds or as text such as ``100ms``; a multiple of the scan's, the default.
            fill: True for a row of every bin, with 0 where nothing was sent; else only bins with traffic have rows.

        Returns:
            One row per bin and conversation (flow, pair of hosts), in order of time.

        Raises:
            UsageError: no such amount or grouping, bins that do not fit the scan's, packets without times, or too many
                rows.
        """
        import pandas as pd

        parts = [_frame(columns, None) for columns in self.rate_batches(by, what, bin_s)]
        table = pd.concat(parts, ignore_index=True)
        return self._filled(table, by, bin_s) if fill else table

    def _filled(self, table: pd.DataFrame, by: str, bin_s: float | str | None) -> pd.DataFrame:
        """Add the bins without traffic to a table of rates."""
        import pandas as pd

        bins = self._wider(bin_s)
        keys = pd.DataFrame(self._groups(by).keys)
        count = (self.bins + bins.skipped - 1) // bins.factor + 1 if self.bins else 0
        if count * max(len(keys), 1) > _MAX_FILLED:
            raise UsageError(
                f"{count:,} bins of {counted(max(len(keys), 1), by)} are more than {_MAX_FILLED:,} rows: choose wider "
                "bins, select some of the traffic, or leave fill out"
            )
        every = pd.DataFrame({"t_ns": bins.start_ns + np.arange(count) * bins.width_ns})
        every = every.merge(keys, how="cross") if len(keys.columns) else every
        value = str(table.columns[-1])
        filled = every.merge(table, how="left", on=[str(name) for name in every])
        return filled.fillna({value: 0.0})

    def packets(self, conversation: int, around: object, within: float | str = 0.01) -> CapturedPackets:
        """Read the packets of a conversation around a time; the captures are read again.

        Args:
            conversation: number of the conversation, as in `conversations`.
            around: the time: nanoseconds since 1970, a ``datetime``, a pandas ``Timestamp``, or text such as
                ``2026-11-23 10:00:00.25``; without a time zone it is UTC.
            within: packets up to so long before and after it, in seconds or as text such as ``10ms``.

        Returns:
            The packets, with ``to_frame()``, ``to_dpkt()``, ``to_scapy()`` and ``to_pcapng()``.

        Raises:
            UsageError: no such conversation, no packet of it in this time, or captures that cannot be read again.
        """
        from ringtap.analysis.pcap.single_packets import CapturePoint, minus, of_conversation, read_packets

        rows, reach_ns = self.scanned.conversations, round(duration_s(within, "a time span") * 1e9)
        if not (hasattr(conversation, "__index__") and 0 <= conversation < len(rows)):
            raise UsageError(f"there is no conversation {conversation!r}: they are numbered 0 to {len(rows) - 1}")
        if "standard input" in self.files or not self.files:
            raise UsageError("the packets of standard input cannot be read again: write them to a file first")
        row, at_ns = rows[conversation], as_time_ns(around)
        points = [
            CapturePoint(Path(name), at_ns - reach_ns + lead, at_ns + reach_ns + lead + 1, minus(lead))
            for name, lead in zip(self.files, self.leads_ns, strict=True)
        ]
        found = read_packets(points, of_conversation(row))
        if not len(found):
            first, last = (format_duration(abs(int(row[name]) - at_ns) / 1e9) for name in ("first_ns", "last_ns"))
            sides = ["before" if int(row[name]) < at_ns else "after" for name in ("first_ns", "last_ns")]
            raise UsageError(
                f"conversation {conversation} has no packet within {format_duration(reach_ns / 1e9)} of this time: its "
                f"first is {first} {sides[0]} it, its last {last} {sides[1]} it"
            )
        return found

    def rate_batches(
        self, by: str = "flow", what: str = "bytes", bin_s: float | str | None = None
    ) -> Iterator[export_scan_tables.Columns]:
        """Yield the columns of `rates`, some bins at a time, without pandas; at least one batch, maybe without rows."""
        _check_amount(what, AMOUNTS)
        return _rate_batches(self._batches(), self._wider(bin_s), self._groups(by), what)

    def _wider(self, bin_s: float | str | None) -> _Bins:
        width_ns = self.bin_ns if bin_s is None else round(duration_s(bin_s, "a width of bins") * 1e9)
        if width_ns < self.bin_ns or width_ns % self.bin_ns:
            asked, mine = (format_duration(max(width, 0) / 1e9) for width in (width_ns, self.bin_ns))
            raise UsageError(
                f"bins of {asked} cannot be made of bins of {mine}: read the captures with bins of {asked}"
            )
        if width_ns > max(self.duration_s * 1e9, _SHORT_BIN_NS):
            raise UsageError(
                f"bins of {format_duration(width_ns / 1e9)} are longer than the captures "
                f"({format_duration(self.duration_s)}), so that rates would be means over time without packets: "
                "name a shorter --bin"
            )
        skipped, factor = self.start_ns % width_ns // self.bin_ns, width_ns // self.bin_ns
        return _Bins(self.start_ns - skipped * self.bin_ns, width_ns, skipped, factor)

    def _checked_bins(self) -> int:
        """Return the number of bins; raise UsageError if memory should not hold an array of so many."""
        if self.bins > _MAX_BINS:
            shown = f"{format_duration(self.duration_s)} in bins of {format_duration(self.bin_ns / 1e9)}"
            raise UsageError(f"{shown} are {self.bins:,} bins: {bins_remedy(self.counts)}")
        return int(self.bins)

    def _groups(self, by: str) -> _Groups:
        if by not in GROUPS:
            raise UsageError(f"rates by {by!r} are not known: {did_you_mean(by, GROUPS)}by {', '.join(GROUPS)}")
        numbers = self.flow_numbers
        group = self._group_of(numbers)
        if by == "total":
            return _Groups({}, group)
        if by == "conversation":
            rows = np.unique(numbers // 2)
            group[numbers] = np.searchsorted(rows, numbers // 2)
            found = export_scan_tables.conversation_columns(self.scanned.conversations[rows])
            names = ("protocol", "a", "a_port", "b", "b_port")
            return _Groups({"conversation": rows} | {name: np.asarray(found[name]) for name in names}, group)
        table = export_scan_tables.flow_columns(self.scanned.conversations, numbers)
        if by == "flow":
            group[numbers] = np.arange(len(numbers))
            names = ("protocol", "source", "source_port", "destination", "destination_port")
            return _Groups({"flow": numbers} | {name: np.asarray(table[name]) for name in names}, group)
        pairs: dict[tuple[str, str], int] = {}
        ends = zip(table["source"], table["destination"], strict=True)
        group[numbers] = [pairs.setdefault(pair, len(pairs)) for pair in ends]
        sides = np.array(list(pairs), np.str_).reshape(-1, 2)
        return _Groups({"source": sides[:, 0], "destination": sides[:, 1]}, group)

    def injection_rate(
        self, flows: Sequence[int] | Integers | None = None, window: int = 1, what: str = "payload"
    ) -> Numbers:
        """Return the combined injection rate of flows, smoothed by a moving average.

        Args:
            flows: flow numbers; None for all that count, outside tunnels.
            window: number of bins averaged, centred on each bin; fewer at the ends. The thesis
                uses 30 and 50 samples in its Figures 3-10 and 3-11, and 18 in B-5.
            what: one of `AMOUNTS` in bytes.

        Returns:
            Rate of each bin in bit/s, shape (bins,).

        Raises:
            UsageError: no such flow or amount, or a window below 1.
        """
        _check_amount(what, AMOUNTS[:3])
        if window < 1:
            raise UsageError(f"a moving average over {window} bins is not possible: take 1 or more")
        rate = self.binned(flows, what) * (8e9 / self.bin_ns)
        total = np.concatenate(([0.0], np.cumsum(rate)))
        begin = np.arange(len(rate)) - window // 2
        first, last = np.maximum(begin, 0), np.minimum(begin + window, len(rate))
        return np.asarray((total[last] - total[first]) / (last - first), np.float64)

    def host_pairs(self, what: str = "payload") -> dict[tuple[str, str], int]:
        """Sum the traffic from each source address to each destination address, largest first.

        Args:
            what: ``bytes``, ``payload``, ``packets`` or another sum of a flow.
        """
        _check_amount(what, _MATRIX_AMOUNTS)
        table = export_scan_tables.flow_columns(self.scanned.conversations, self.flow_numbers)
        found: dict[tuple[str, str], int] = {}
        for source, destination, amount in zip(
            table["source"], table["destination"], table[what].tolist(), strict=True
        ):
            found[source, destination] = found.get((source, destination), 0) + amount
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def matrix(self, what: str = "payload") -> pd.DataFrame:
        """Return the traffic matrix.

        Args:
            what: ``bytes``, ``payload``, ``packets`` or another sum of a flow.

        Returns:
            A square table: one row per source address, one column per destination address.

        Raises:
            UsageError: no such amount, or too many addresses for a square table.
        """
        import pandas as pd

        pairs = self.host_pairs(what)
        names = sorted({name for pair in pairs for name in pair})
        if len(names) > _MAX_HOSTS:
            raise UsageError(f"a matrix of {len(names):,} hosts cannot be shown: select some, or use host_pairs()")
        index = {name: number for number, name in enumerate(names)}
        square = np.zeros((len(names), len(names)), np.int64)
        for (source, destination), amount in pairs.items():
            square[index[source], index[destination]] = amount
        return pd.DataFrame(square, index=pd.Index(names, name="source"), columns=pd.Index(names, name="destination"))


def no_conversations(counts: Mapping[str, int]) -> str:
    """Return a clause about a capture without conversations, with the reason."""
    cut = counts["cut_by_snap"]
    why = f", because the headers of {counted(cut, 'packet')} were cut off: capture more of each" if cut else ""
    return f"there are no conversations{why}"


def bins_remedy(counts: Mapping[str, int]) -> str:
    """Return advice for a capture with more bins than memory should hold."""
    if counts.get("time_jumps"):
        return "its clock jumps by more than a day; read the packets of one side alone (editcap -A TIME FILE PART)"
    return "choose wider ones, for example of 1 s"


def endpoint(address: str, port: int) -> str:
    """Format an address and a port; the address alone if there is no port."""
    if not port:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _check_amount(what: str, known: Sequence[str]) -> None:
    if what not in known:
        raise UsageError(f"{what!r} is not counted: {did_you_mean(what, known)}there are {', '.join(known)}")


def _frame(columns: export_scan_tables.Columns, index: Integers | None) -> pd.DataFrame:
    import pandas as pd

    made = {
        name: pd.array(values, "Int64") if isinstance(values, list) and name.endswith("_ns") else values
        for name, values in columns.items()
    }
    return pd.DataFrame(made, index=index)


@dataclass(frozen=True)
class _Groups:
    """Groups of flows whose rates are computed.

    Attributes:
        keys: columns that name the groups.
        of_flow: group number of each flow of the scan; -1 if the flow does not count.
    """

    keys: dict[str, npt.NDArray[Any]]
    of_flow: Integers

    @property
    def count(self) -> int:
        """Number of groups, at least 1."""
        return max(1, int(self.of_flow.max(initial=-1)) + 1)


@dataclass(frozen=True)
class _Bins:
    """Bins that each cover one or more bins of the scan.

    Attributes:
        start_ns: start of the first bin, a multiple of the width.
        width_ns: width of a bin.
        skipped: number of scan bins that the first bin covers before the first bin of the scan.
        factor: number of scan bins per bin.
    """

    start_ns: int
    width_ns: int
    skipped: int
    factor: int

    def of(self, cells: Cells) -> Integers:
        """Return the bin of each cell."""
        return np.asarray((cells["bin"].astype(np.int64) + self.skipped) // self.factor)


def _rate_batches(batches: _Batches, bins: _Bins, groups: _Groups, what: str) -> Iterator[export_scan_tables.Columns]:
    """Yield the rates of the groups, in order of time and group, for bins with a nonzero amount.

    Args:
        batches: the cells.
        bins: the bins of the rates.
        groups: the groups of the rates.
        what: the amount, a field of ``scan_dtypes.CELL``.

    Yields:
        ``t_ns``, the key columns and ``rate_bps`` (``rate_pps``); at least once, maybe without rows.
    """
    name, scale = ("rate_pps", 1e9) if what.endswith("packets") else ("rate_bps", 8e9)
    windows, ranges = _windows(batches, bins)
    for first, last in windows:
        keys, amounts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for read, (least, most) in zip(batches, ranges, strict=True):
            if most < first or least >= last:
                continue
            cells = read()
            number, group = bins.of(cells), groups.of_flow[cells["flow"]]
            mine = (number >= first) & (number < last) & (group >= 0)
            keys.append(number[mine] * groups.count + group[mine])
            amounts.append(cells[what][mine].astype(np.int64))
        key, row = np.unique(np.concatenate(keys), return_inverse=True)
        total = np.bincount(row, np.concatenate(amounts), len(key))
        key, total = key[total > 0], total[total > 0]
        columns: export_scan_tables.Columns = {"t_ns": bins.start_ns + key // groups.count * bins.width_ns}
        columns |= {column: values[key % groups.count] for column, values in groups.keys.items()}
        yield columns | {name: total * scale / bins.width_ns}


def _windows(batches: _Batches, bins: _Bins) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return ranges of bins with about `_TOGETHER` cells each, and the range of bins of each batch.

    If a clock was set, bins may far outnumber cells; the ranges therefore begin at sampled cells.
    """
    step = max(1, _TOGETHER // 64)
    samples, ranges = [], []
    for read in batches:
        numbers = np.sort(bins.of(read()))
        samples.append(numbers[::step])
        ranges.append((int(numbers[0]), int(numbers[-1])))
    begins = np.unique(np.sort(np.concatenate([np.zeros(1, np.int64), *samples]))[:: _TOGETHER // step])
    edges = [*begins.tolist(), max((last for _, last in ranges), default=0) + 1]
    return list(itertools.pairwise(edges)), ranges
