"""The first page of the live view: a little of everything, made to fit the lines there are."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from ringtap.analysis.live import drawing, tables
from ringtap.analysis.live.drawing import BAD, DIM, HEADER, WARNING, Row, count
from ringtap.analysis.live.snapshot import Collector, Snapshot

_GOOD_STATES = ("ok", "running")


def overview(snapshot: Snapshot, words: str, width: int, height: int) -> list[Text]:
    """Interfaces, busiest flows, queues, hosts and collectors in ``height`` lines.

    Args:
        snapshot: the run, reduced to the nodes wanted.
        words: only rows with these words.
        width: cells of a line.
        height: lines.
    """
    nics = _rows(tables.NICS, snapshot, words)
    flows = _rows(tables.FLOWS, snapshot, words)
    queues = [row for row in _rows(tables.QUEUES, snapshot, words) if row.keys[5] or row.keys[8]]
    nodes = _rows(tables.NODES, snapshot, words)
    state = _state(snapshot.collectors, width)
    # lines for each part: its head and one row at least; what is left goes round
    parts = [(tables.NICS, nics), (tables.FLOWS, flows), (tables.QUEUES, queues), (tables.NODES, nodes)]
    parts = [part for part in parts if part[1] or part[0] in (tables.NICS, tables.FLOWS)]
    shares = _share_out([len(rows) or 1 for _, rows in parts], height - len(parts) - len(state))
    lines: list[Text] = []
    for (page, rows), share in zip(parts, shares, strict=True):
        if not rows:
            lines.append(Text(page.title, HEADER))
            lines.append(Text(("Nothing matches." if words else page.empty(snapshot))[:width], DIM))
        else:
            lines += drawing.table(page.columns, rows[:share], width, page.sort, page.descending)
    return (lines + state)[: max(0, height)]


def _rows(page: tables.Table, snapshot: Snapshot, words: str) -> list[Row]:
    rows = drawing.matching(list(page.rows(snapshot)), words)
    if page is tables.NICS:  # the busiest first, loopback at the end
        rows.sort(key=lambda row: (row.keys[1] == "lo", -max(row.keys[2] or 0, row.keys[3] or 0)))
    return drawing.order(rows, page.sort, page.descending) if page.sort is not None else rows


def _share_out(wanted: Sequence[int], lines: int) -> list[int]:
    """Give each part what it wants as far as the lines go, one each by turns."""
    given = [min(1, want) for want in wanted]
    while sum(given) < lines and any(have < want for have, want in zip(given, wanted, strict=True)):
        for number, want in enumerate(wanted):
            if given[number] < want and sum(given) < lines:
                given[number] += 1
    return given


def _state(collectors: Sequence[Collector], width: int) -> list[Text]:
    """Each collector in a word or two, in as few lines as they need, and why the first that failed did."""
    by_name: dict[str, list[Collector]] = {}
    for item in collectors:
        by_name.setdefault(item.name, []).append(item)
    lines = [Text("State ", HEADER, no_wrap=True, end="")] if by_name else []
    for name, items in by_name.items():
        words, style = _words(name, items)
        if cell_len(lines[-1].plain) + 1 + cell_len(words) > width:
            lines.append(Text(" " * 6, no_wrap=True, end=""))
        lines[-1].append(" ").append(words, style).append(" ")
    trouble = next((item for item in collectors if item.health == "bad" and item.reason), None)
    if trouble:
        sentence = f"       {trouble.name} on {trouble.node}: {trouble.reason}"
        lines.append(Text(drawing.cut(sentence, width), BAD, no_wrap=True, end=""))
    return lines[:4]


def _words(name: str, items: Sequence[Collector]) -> tuple[str, str]:
    """A collector's state on all nodes in a few words, and their style: the worst node counts."""
    worst = next((item for health in ("bad", "warning") for item in items if item.health == health), items[0])
    missed, lost = sum(item.missed or 0 for item in items), sum(item.lost or 0 for item in items)
    losses = [f"{count(number)} {what}" for number, what in ((missed, "missed"), (lost, "lost")) if number]
    word = worst.state if worst.state not in _GOOD_STATES else "ok" if worst.health == "good" else "silent"
    calm = DIM if worst.state == "unavailable" else WARNING if lost or worst.health == "warning" else "green"
    return f"{name} {word}{' (' + ', '.join(losses) + ')' if losses else ''}", BAD if worst.health == "bad" else calm
