"""Writes captures as text: sentences about anomalies, and the summary for a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap import export_scan_tables
from ringtap.analysis.pcap.captured_traffic import Traffic, endpoint, no_conversations
from ringtap.analysis.pcap.duplicates import has_copies
from ringtap.analysis.pcap.scan import MAX_CONVERSATIONS
from ringtap.core.terminal_escaping import text_table
from ringtap.core.units import format_duration, format_rate, format_size

_SHOWN = 10
_DAY_S, _MINUTE_S = 86_400.0, 60.0
_HEAD = ("", "from", "to", "packets", "payload", "back", "start", "duration", "rate", "resent", "round trip")
SORTS = {
    "payload": "payload",
    "bytes": "bytes",
    "packets": "packets",
    "start": "first_ns",
    "duration": "last_ns",
    "resent": "retransmitted_bytes",
}
"""Orders of the conversations in the text, and the field that each sorts by."""
_FEW_HOSTS, _MAX_HOSTS = 8, 32
_OFFLOADED = 1.05  # segments per packet above which captured packets hold several wire segments

# count: the thing counted, and the effect on the numbers
_SENTENCES = {
    "unpacking_cut": ("compressed file", "ends too early: what came until then is counted"),
    "unpacking_damaged": ("compressed file", "is damaged: what came until then is counted"),
    "bytes_after_gzip": ("compressed file", "continues with bytes that are not gzip: they are ignored"),
    "torn_bytes": ("byte", "at the end belong to a packet that is not whole: the capture was cut off"),
    "corrupt_records": ("damaged place", "was skipped, up to the next valid record"),
    "corrupt_bytes": ("byte", "were skipped there"),
    "packets_over_limit": (
        "packet",
        f"belong to conversations beyond the first {MAX_CONVERSATIONS:,}: one row, 'others', sums them",
    ),
    "queue_pairs_over_limit": ("RoCE packet", "belong to queue pairs beyond the limit: not in their table"),
    "cut_by_snap": ("packet", "lack a header that the capture cut off: counted as far as the headers go"),
    "malformed": ("packet", "have headers that contradict themselves: counted as far as they make sense"),
    "zero_length_ip": (
        "packet",
        "have no length in the IP header, as with segmentation offload: the frame's is used",
    ),
    "fragments": ("IP fragment", "count for the conversation of the first one"),
    "fragments_without_first": ("fragment", "came without the first of the packet: ports are not known"),
    "time_backwards": ("packet", "are earlier than one before them: several processors captured, or a clock was set"),
    "times_out_of_range": ("packet", "have an impossible time (before 1970 or after 2116)"),
    "without_time": ("packet", "have no time"),
    "set_back": (
        "packet",
        "are more than a minute earlier than one before them (a clock was set back?): no rate spans that time",
    ),
    "time_jumps": (
        "packet",
        "are more than a day after or before the one ahead (a clock was set?): no rate spans that time",
    ),
    "network_changes": (
        "packet",
        "have another VLAN or VXLAN network than the previous one in their conversation: not distinguished",
    ),
    "skipped_link_types": ("packet", "come from a link type that is not read: in the totals only"),
    "without_interface": ("packet", "name an interface that the file does not describe: they are left out"),
    "copies": ("packet", "are copies of one before, as of several interfaces of a bridge: in the totals only"),
    "dropped": ("packet", "were dropped, as the capture itself counts: they are missing here"),
    "unknown_blocks": ("pcapng block", "hold no packets: skipped"),
    "not_ip": ("frame", "are no IP (ARP, LLDP, spanning tree, …): in the totals, and where a filter takes them"),
}
# those that mean that a part of the captures is not in the numbers
_DAMAGE = (
    *("unpacking_cut", "unpacking_damaged", "corrupt_records", "torn_bytes", "malformed"),
    *("packets_over_limit", "queue_pairs_over_limit", "skipped_link_types", "without_interface", "dropped"),
)
_NOT_TIMED = ("times_out_of_range", "without_time")
# "1 packet belong" becomes "1 packet belongs"
_SINGULAR = {
    "belong": "belongs",
    "lack": "lacks",
    "have": "has",
    "are": "is",
    "come": "comes",
    "hold": "holds",
    "were": "was",
    "name": "names",
    "count": "counts",
}
_PLURAL = {"ends": "end", "is": "are", "continues": "continue", "was": "were", "came": "came"}


def damage(counts: Mapping[str, int]) -> list[str]:
    """Return a sentence about each anomaly because of which a part of the captures is not in the numbers."""
    return [_note(counts[name], *_SENTENCES[name]) for name in _DAMAGE if counts.get(name)]


def notes(traffic: Traffic) -> list[str]:
    """Return notes on the anomalies of the captures, and on their effect on the numbers."""
    counts = traffic.counts
    untimed = "counted at that of the packet before, or of the first that has one, and not timed"
    if not traffic.bins:
        untimed = "nothing is timed"
    lines = [*traffic.left_out]
    lines += [
        _note(counts[name], *_SENTENCES[name]) + (f": {untimed}" if name in _NOT_TIMED else "")
        for name in _SENTENCES
        if counts.get(name)
    ]
    known = {*_SENTENCES, "packets", "bytes"}
    lines += [f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items() if number and name not in known]
    rows = traffic.scanned.conversations[traffic.rows]
    segments, packets = (int(rows[name].sum()) for name in ("segments", "data_packets"))
    if segments > _OFFLOADED * packets:
        lines.append(
            f"{packets:,} packets with payload were {segments:,} segments on the wire: the host captured before "
            f"segmentation or after joining, so frame bytes lack their headers; payload is correct"
        )
    if has_copies(rows):
        lines.append(
            "each byte of a large flow is there more than once, as of several interfaces of a bridge, and each copy "
            "counts: read a file rather than a pipe, or capture one interface"
        )
    return lines


def _note(number: int, what: str, rest: str) -> str:
    verb, _, others = rest.partition(" ")
    verb = _SINGULAR.get(verb, verb) if number == 1 else _PLURAL.get(verb, verb)
    return f"{number:,} {what}{'' if number == 1 else 's'} {verb} {others}"


def describe(traffic: Traffic, filtered: str | None, with_matrix: bool, sort: str = "payload") -> list[str]:
    """Return the summary for a terminal, as lines.

    Args:
        traffic: the traffic read.
        filtered: the filter, as the user wrote it.
        with_matrix: True if the traffic matrix was asked for; a small one is shown anyway.
        sort: one of `SORTS`; it decides which conversations are shown, and their order.
    """
    lines = [_answer(traffic), "", *_totals(traffic, filtered)]
    if len(traffic.rows):
        lines += ["", *_largest(traffic, sort)]
    lines += _matrix(traffic, with_matrix)
    if found := notes(traffic):
        lines += ["", "Warnings", *(f"  {line}" for line in found)]
    return lines


def _answer(traffic: Traffic) -> str:
    """Return the conversation with the most payload and its share, or why there is none."""
    rows = traffic.rows
    if not len(rows):
        why = no_conversations(traffic.counts)
        return f"{why[0].upper()}{why[1:]}."
    conversations, sides = traffic.scanned.conversations, traffic.selected.reshape(-1, 2)
    amounts = (conversations["payload"][rows] * sides[rows]).sum(1)
    total, largest = int(amounts.sum()), int(amounts.argmax())
    found = f"{len(rows):,} conversation{'' if len(rows) == 1 else 's'}"
    if not total:
        return f"{found}, and none has payload."
    columns = export_scan_tables.conversation_columns(
        conversations[rows[[largest]]], sides[rows[[largest]]].reshape(-1)
    )
    (item,) = export_scan_tables.rows_of(columns)
    start, end = (endpoint(item[side], item[f"{side}_port"]) for side in "ab")
    share = f"{amounts[largest] / total:.0%} of all payload"
    moved = f"{format_size(int(amounts[largest]))} or {share}"
    return f"{found}: the one between {start} and {end} ({item['protocol']}) moves most, {moved}."


def _totals(traffic: Traffic, filtered: str | None) -> list[str]:
    scanned, counts = traffic.scanned, traffic.counts
    names = ", ".join(traffic.files[:3]) + (f" and {len(traffic.files) - 3} more" if len(traffic.files) > 3 else "")
    lines = [f"{names}: no packet has a time"]
    if traffic.bins:
        lines = [f"{names}: from {utc_text(scanned.first_ns)}, {format_duration(traffic.duration_s)}"]
    lines.append(f"{_amounts(counts['packets'], counts['bytes'], traffic)}{_kinds(traffic)}")
    if filtered is not None:
        rows = scanned.conversations[traffic.flow_numbers // 2]
        side = traffic.flow_numbers % 2
        packets, size = (int(rows[name][np.arange(len(rows)), side].sum()) for name in ("packets", "bytes"))
        lines.append(f"of these {filtered!r}: {_amounts(packets, size, traffic)}")
    return lines


def utc_text(time_ns: int) -> str:
    """Format a time since the epoch, to the millisecond."""
    seconds, part_ns = divmod(time_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + f".{part_ns // 1_000_000:03d} UTC"


def _amounts(packets: int, size: int, traffic: Traffic) -> str:
    rate = _rate(size, traffic.duration_s, traffic)
    return f"{packets:,} packet{'' if packets == 1 else 's'}, {format_size(size)} on the wire{rate and f', {rate}'}"


def _rate(size: int, seconds: float, traffic: Traffic) -> str:
    """Format bytes over a time as a rate; empty if the time is 0 or a clock was set within it."""
    counts = traffic.counts
    is_set = (counts.get("time_jumps") and seconds > _DAY_S) or (counts.get("set_back") and seconds > _MINUTE_S)
    return format_rate(size * 8 / seconds) if seconds > 0 and not is_set else ""


def _kinds(traffic: Traffic) -> str:
    protocols = export_scan_tables.protocols(traffic.scanned.conversations[traffic.rows])
    counted = {name: protocols.count(name) for name in dict.fromkeys(protocols)}
    shown = [f"{number:,} of {name}" for name, number in sorted(counted.items(), key=lambda item: -item[1])]
    return f"; conversations: {', '.join(shown)}" if shown else ""


def _order(traffic: Traffic, rows: npt.NDArray[np.int64], sort: str) -> npt.NDArray[np.int64]:
    """Return the order of conversations asked for: largest first; by start, earliest first."""
    conversations, selected = traffic.scanned.conversations[rows], traffic.selected.reshape(-1, 2)[rows]
    if sort == "start":
        return np.argsort(conversations["first_ns"], kind="stable")
    packets = (conversations["packets"] * selected).sum(1).astype(np.int64)
    if sort == "duration":
        weight = conversations["last_ns"] - conversations["first_ns"]
    else:
        weight = (conversations[SORTS[sort]] * selected).sum(1).astype(np.int64)
    return np.lexsort((-packets, -weight))


def _largest(traffic: Traffic, sort: str) -> list[str]:
    """Return a table of the first conversations, each written from the side that sent more payload."""
    rows = traffic.rows
    conversations = traffic.scanned.conversations
    chosen = rows[_order(traffic, rows, sort)[:_SHOWN]]
    columns = export_scan_tables.conversation_columns(
        conversations[chosen], traffic.selected.reshape(-1, 2)[chosen].reshape(-1)
    )
    table = [_HEAD]
    for item in export_scan_tables.rows_of(columns):
        forward, back = ("ab", "ba") if item["payload_ab"] >= item["payload_ba"] else ("ba", "ab")
        endpoints = [endpoint(item[end], item[f"{end}_port"]) for end in forward]
        seconds = (item["last_ns"] - item["first_ns"]) / 1e9 if traffic.bins else 0.0
        round_trip_ns = _round_trip_ns(item)
        table.append(
            (
                item["protocol"] + (" in a tunnel" if item["inner"] else ""),
                *endpoints,
                f"{item['packets_ab'] + item['packets_ba']:,}",
                format_size(item[f"payload_{forward}"]),
                format_size(item[f"payload_{back}"]),
                f"+{format_duration((item['first_ns'] - traffic.scanned.first_ns) / 1e9)}" if traffic.bins else "-",
                format_duration(seconds) if traffic.bins else "-",
                _rate(item[f"bytes_{forward}"], seconds, traffic) or "-",
                format_size(item[f"retransmitted_bytes_{forward}"]) if item["protocol"] == "tcp" else "-",
                format_duration(round_trip_ns / 1e9) if round_trip_ns is not None else "-",
            )
        )
    lines = text_table(table, 3)
    if len(rows) > len(chosen):
        lines.append(f"… and {len(rows) - len(chosen):,} more (-o TABLE.csv, or --json)")
    return lines


def _round_trip_ns(item: Mapping[str, Any]) -> int | None:
    """Return the whole round trip, wherever it was captured: the handshake's, or the sum of both directions' minima."""
    minima = [item["rtt_min_ns_ab"], item["rtt_min_ns_ba"]]
    if item["handshake_ns"] is not None:
        return int(item["handshake_ns"])
    return None if None in minima else sum(minima)


def _matrix(traffic: Traffic, asked: bool) -> list[str]:
    pairs = traffic.host_pairs()
    hosts = sorted({host for pair in pairs for host in pair})
    if not asked and not 2 < len(hosts) <= _FEW_HOSTS:
        return []
    if len(hosts) > _MAX_HOSTS:
        return ["", f"The matrix of {len(hosts):,} hosts is in --json only"]
    senders, receivers = (sorted({pair[side] for pair in pairs}) for side in (0, 1))
    head = [("payload from \\ to", *receivers)]
    shown = {pair: format_size(amount) for pair, amount in pairs.items()}
    cells = [(host, *(shown.get((host, other), "-") for other in receivers)) for host in senders]
    return ["", *text_table(head + cells, 1)]
