"""Layout of the screen for a snapshot, the state that keys have set, and a size; independent of textual."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from ringtap.analysis.live import drawing, pages
from ringtap.analysis.live.drawing import BAD, DIM, HEADER, WARNING, TextRow, count
from ringtap.analysis.live.iterations import Iteration
from ringtap.analysis.live.snapshot import Collector, Mark, Snapshot
from ringtap.units import counted

_GOOD_STATES = ("ok", "running")


def overview(snapshot: Snapshot, words: str, width: int, height: int) -> list[Text]:
    """Return interfaces, busiest flows, queues, hosts and collectors in at most ``height`` lines.

    Args:
        snapshot: the run, reduced to the nodes wanted.
        words: show only rows with these words.
        width: number of cells of a line.
        height: number of lines.
    """
    nics = _rows(pages.NICS, snapshot, words)
    flows = _rows(pages.FLOWS, snapshot, words)
    queues = [row for row in _rows(pages.QUEUES, snapshot, words) if row.keys[5] or row.keys[8]]
    nodes = _rows(pages.NODES, snapshot, words)
    state = _state(snapshot.collectors, width)
    # lines for each part: its head and one row at least; the rest is given in turns
    parts = [(pages.NICS, nics), (pages.FLOWS, flows), (pages.QUEUES, queues), (pages.NODES, nodes)]
    parts = [part for part in parts if part[1] or part[0] in (pages.NICS, pages.FLOWS)]
    shares = _share_out([len(rows) or 1 for _, rows in parts], height - len(parts) - len(state))
    lines: list[Text] = []
    for (page, rows), share in zip(parts, shares, strict=True):
        if not rows:
            lines.append(Text(page.title, HEADER))
            lines.append(Text(("Nothing matches." if words else page.empty(snapshot))[:width], DIM))
        else:
            lines += drawing.table(page.columns, rows[:share], width, page.sort, page.descending)
    return (lines + state)[: max(0, height)]


def _rows(page: pages.Page, snapshot: Snapshot, words: str) -> list[TextRow]:
    rows = drawing.matching(list(page.rows(snapshot)), words)
    if page is pages.NICS:  # the busiest first, loopback at the end
        rows.sort(key=lambda row: (row.keys[1] == "lo", -max(row.keys[2] or 0, row.keys[3] or 0)))
    return drawing.order(rows, page.sort, page.descending) if page.sort is not None else rows


def _share_out(wanted: Sequence[int], lines: int) -> list[int]:
    """Distribute the lines, one each in turns, up to the number that each part wants."""
    given = [min(1, want) for want in wanted]
    while sum(given) < lines and any(have < want for have, want in zip(given, wanted, strict=True)):
        for number, want in enumerate(wanted):
            if given[number] < want and sum(given) < lines:
                given[number] += 1
    return given


def _state(collectors: Sequence[Collector], width: int) -> list[Text]:
    """Return each collector's state in a word or two, in few lines, and the reason of the first failure."""
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
    """Return a collector's state on all nodes in a few words, and their style; the worst node counts."""
    worst = next((item for health in ("bad", "warning") for item in items if item.health == health), items[0])
    missed, lost = sum(item.missed or 0 for item in items), sum(item.lost or 0 for item in items)
    losses = [f"{count(number)} {what}" for number, what in ((missed, "missed"), (lost, "lost")) if number]
    word = worst.state if worst.state not in _GOOD_STATES else "ok" if worst.health == "good" else "silent"
    calm = DIM if worst.state == "unavailable" else WARNING if lost or worst.health == "warning" else "green"
    return f"{name} {word}{' (' + ', '.join(losses) + ')' if losses else ''}", BAD if worst.health == "bad" else calm


_TABLES: tuple[pages.Page | None, ...] = (
    None,
    pages.FLOWS,
    pages.NICS,
    pages.QUEUES,
    pages.RANKS,
    pages.NODES,
    pages.PROCESSES,
    pages.GPUS,
    pages.COLLECTORS,
    None,
)
PAGES = tuple(table.title if table else name for table, name in zip(_TABLES, ("All", *[""] * 8, "Log"), strict=True))
_OVERVIEW, _LOG = 0, len(PAGES) - 1
_AXIS = 8
_SLOW = 1.5
_TWO_PLOTS = 110
_SILENT_S = 5.0
_MARKS = 5
_KEYS = "s sort  r reverse  / filter  n node  p pause  m mark  ? help  q quit"
_HELP = """\
1 … 9, 0, Tab, ← → page; ↑ ↓ PgUp PgDn Home End move within it
s  r               sort by the next column; turn the order round
/                  show only rows with these words (Enter keeps, Escape clears)
n                  one node after the other, then all
p                  hold the picture, go on (the recording goes on meanwhile)
m                  mark this moment: the text goes into the run's marks.jsonl
q                  leave; the recording and the job go on

Iterations  ▲ far slower than the others, drawn cut; yellow: over 1.5 times the
            median; ▾ a mark. Slowest rank: most often the last to end its step.
Flows       yellow: segments were sent again. A flow is told by its sender; if
            only the receiver's node records, RTT, cwnd, delivery are not known.
backlog     the largest of the last second
behind      how much later than the first rank a rank ended the last iteration
missed      samples that were due and not taken; lost: records or packets lost"""


@dataclass
class ViewState:
    """Settings of the view, chosen by keys.

    Attributes:
        page: number of the page shown.
        node: the one node shown; empty for all.
        words: only rows with these words are shown.
        paused: True if the picture is held.
        help: True if the list of keys is shown.
        offset: first row shown of the page.
        message: a sentence for the status line.
    """

    page: int = 0
    node: str = ""
    words: str = ""
    paused: bool = False
    help: bool = False
    offset: int = 0
    message: str = ""
    _sort: dict[int, tuple[int | None, bool]] = field(default_factory=dict)

    @property
    def table(self) -> pages.Page | None:
        """The table shown; None on a page that is not a table."""
        return _TABLES[self.page]

    def sorting(self) -> tuple[int | None, bool]:
        """Return the column that the page is sorted by, and True if descending."""
        table = self.table
        return self._sort.get(self.page, (table.sort, table.descending) if table else (None, True))

    def sort_next(self) -> None:
        """Sort by the next column, if the page is a table."""
        if self.table:
            column, descending = self.sorting()
            following = 0 if column is None else (column + 1) % len(self.table.columns)
            self._sort[self.page] = (following, descending)

    def reverse(self) -> None:
        """Reverse the order."""
        column, descending = self.sorting()
        if self.table and column is not None:
            self._sort[self.page] = (column, not descending)

    def next_node(self, names: list[str]) -> None:
        """Show the next node; after the last one, all nodes."""
        names = ["", *names]
        self.node = names[(names.index(self.node) + 1) % len(names)] if self.node in names else ""
        self.offset = 0

    def show_page(self, number: int) -> None:
        """Show a page from its top."""
        self.page, self.offset, self.help = number, 0, False

    def scroll(self, lines: int) -> None:
        """Move down within the page; the log is counted from its end."""
        self.offset = max(0, self.offset + (-lines if self.page == _LOG else lines))

    def turn(self, by: int) -> None:
        """Show the page that many pages further."""
        self.show_page((self.page + by) % len(PAGES))


class Screenful:
    """Contents of the screen at one moment.

    Args:
        snapshot: the run; None before the first snapshot.
        state: settings chosen by keys; the offset is brought into range.
        width: number of cells of a line.
        height: number of lines of the terminal.
    """

    def __init__(self, snapshot: Snapshot | None, state: ViewState, width: int, height: int) -> None:
        self._all = snapshot
        self._run = _of_node(snapshot, state.node) if snapshot else None
        self._state, self._width, self._height = state, max(20, width), height

    def parts(self) -> dict[str, list[Text]]:
        """Return the lines by part of the screen: title, top, bar, page, status."""
        top = self._top(2 if self._height < 20 else 4 if self._height < 32 else 6 if self._height < 44 else 9)
        room = max(1, self._height - 3 - len(top))
        return {
            "title": [self._title()],
            "top": top,
            "bar": [self._bar()],
            "page": self._page(room)[:room],
            "status": [self._status()],
        }

    def _title(self) -> Text:
        run = self._run
        if run is None:
            return _line("ringtap live", self._width, "reverse")
        name = Path(run.path).resolve().name
        silent = [node.age_s for node in run.nodes if node.age_s is not None and node.age_s > _SILENT_S]
        style = {"running": "bold green", "complete": "bold"}.get(run.status, f"bold {BAD}")
        nodes = self._state.node or f"{len(run.nodes)} node{'s' if len(run.nodes) != 1 else ''}"
        ranks = run.iterations.ranks
        parts: list[tuple[str, str]] = [(run.status, style), (drawing.clock(run.elapsed_s), ""), (nodes, "")]
        parts += [(f"{ranks} of {counted(max(run.iterations.world_size, ranks), 'rank')}", "")] if ranks else []
        parts += [(f"no sample for {max(silent):.0f} s", BAD)] if silent and not run.ended else []
        parts += [("PAUSED", f"bold {WARNING}")] if self._state.paused else []
        tail = Text("  ").join(Text(text, style) for text, style in parts)
        room = self._width - cell_len(tail.plain) - 1
        line = Text(no_wrap=True, end="").append(drawing.cut(name, max(0, room)), HEADER).append(" ").append_text(tail)
        line.truncate(self._width)
        return line

    def _top(self, plot_lines: int) -> list[Text]:
        """Return the iteration time (without iterations: the throughput) as text and with its history."""
        run = self._run
        if run is None:
            return [_line("Looking …", self._width)]
        if not run.iterations.history:
            words = _no_iterations(run)
            return [words, *self._throughput(self._width, plot_lines)]
        iterations, width = run.iterations, self._width
        last = iterations.history[-1]
        line = Text(no_wrap=True, end="").append(f"iteration {last.number}  ", HEADER)
        line.append(_seconds(iterations.last_s), _pace(last, iterations.median_s) or "bold green")
        line.append(f"  median {_seconds(iterations.median_s)}  p99 {_seconds(iterations.p99_s)}")
        line.append(f" of {iterations.over}", DIM)
        if iterations.slowest_rank is not None:
            line.append(f"  slowest rank {iterations.slowest_rank} ({iterations.slowest_share:.0%})")
        line.append("  began anew" if iterations.restarts else "", WARNING)
        line.truncate(width)
        if width < _TWO_PLOTS:
            return [line, *self._iterations(width, plot_lines)]
        left, right = self._iterations(width // 2 - 1, plot_lines), self._throughput(width - width // 2 - 1, plot_lines)
        pairs = zip(left, right, strict=True)
        return [
            line,
            *(Text(no_wrap=True, end="").append_text(one).append("  ").append_text(two) for one, two in pairs),
        ]

    def _iterations(self, width: int, height: int) -> list[Text]:
        assert self._run is not None
        stats = self._run.iterations
        shown = stats.history[-(width - _AXIS) :]
        styles = [_pace(iteration, stats.median_s) or "green" for iteration in shown]
        lines, top = drawing.bars(
            [item.seconds for item in shown], width - _AXIS, height, styles, _ticks(shown, self._run.marks)
        )
        return _with_axis(lines, _seconds(top))

    def _throughput(self, width: int, height: int) -> list[Text]:
        assert self._run is not None
        values = [max(item.tx_bps, item.rx_bps) for item in self._run.throughput[-(width - _AXIS) :]]
        lines, top = drawing.bars(values, width - _AXIS, height, ["cyan"] * len(values))
        return _with_axis(lines, f"{drawing.gbps(top)} G" if values else "")

    def _bar(self) -> Text:
        """Return the pages and their keys; if they do not all fit, only the current page has its name."""
        words = [f"{(number + 1) % 10} {name}" for number, name in enumerate(PAGES)]
        if sum(len(word) for word in words) + len(words) > self._width:
            words = [word if number == self._state.page else word[0] for number, word in enumerate(words)]
        line = Text(no_wrap=True, end="")
        for number, word in enumerate(words):
            line.append(word, "reverse" if number == self._state.page else DIM).append(" ")
        line.truncate(self._width)
        return line

    def _page(self, room: int) -> list[Text]:
        state, run = self._state, self._run
        if state.help:
            return [_line(text, self._width) for text in _HELP.splitlines()]
        if run is None:
            return []
        if state.page == _OVERVIEW:
            state.offset = 0
            return overview(run, state.words, self._width, room)
        table = state.table
        if table is None:
            return self._log(run, room)
        rows = drawing.matching(list(table.rows(run)), state.words)
        if not rows:
            sentence = "Nothing matches the filter." if state.words else table.empty(run)
            return [_line(sentence, self._width, DIM)]
        column, descending = state.sorting()
        rows = drawing.order(rows, column, descending) if column is not None else rows
        state.offset = max(0, min(state.offset, len(rows) - (room - 1)))
        head, *lines = drawing.table(table.columns, rows, self._width, column, descending)
        return [head, *lines[state.offset :]]

    def _log(self, run: Snapshot, room: int) -> list[Text]:
        """Return the job's last lines and the last marks; the offset counts from the end."""
        wanted = self._state.words.lower().split()
        lines = [line for line in run.output if all(word in line.lower() for word in wanted)]
        marks = [f"{time.strftime('%H:%M:%S', time.localtime(mark.t_ns / 1e9))} ▾ {mark.text}" for mark in run.marks]
        lines += marks[-_MARKS:]
        if not lines:
            text = "The job's output goes to its own terminal (ringtap run --live keeps it here)."
            return [_line("Nothing matches the filter." if wanted else text, self._width, DIM)]
        self._state.offset = min(self._state.offset, max(0, len(lines) - room))
        end = len(lines) - self._state.offset
        return [_line(line, self._width) for line in lines[max(0, end - room) : end]]

    def _status(self) -> Text:
        state, run = self._state, self._run
        if state.message:
            return _line(state.message, self._width, HEADER)
        told = [f"filter: {state.words}"] if state.words else []
        if state.table and state.sorting()[0] is not None:
            column, descending = state.sorting()
            told.append(f"by {state.table.columns[column or 0].title}{'▼' if descending else '▲'}")
        line = Text(no_wrap=True, end="")
        if run is not None and run.ended and not told:
            line.append(f"The run is {run.status}{': ' + run.why if run.why else ''}. ", HEADER)
            keys = "q quit, then: ringtap analyze"
        else:
            line.append("".join(f"{word}  " for word in told), HEADER)
            keys = _KEYS
        line.append(keys, DIM)
        line.truncate(self._width)
        return line


def _line(text: str, width: int, style: str = "") -> Text:
    return Text(drawing.cut(text, width), style=style, no_wrap=True, end="")


def _seconds(value: float | None) -> str:
    """Format a time with its unit, in three or four figures and at most seven cells."""
    if value is None:
        return "-"
    number, unit = (value, "s") if value >= 0.9995 else (value * 1e3, "ms")
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def _pace(iteration: Iteration, median_s: float | None) -> str:
    """Return the style of an iteration that was skipped or slow; empty for others."""
    if iteration.skipped:
        return "magenta"
    return WARNING if median_s and iteration.seconds > _SLOW * median_s else ""


def _ticks(shown: tuple[Iteration, ...], marks: tuple[Mark, ...]) -> list[bool]:
    """Mask of the iterations with a mark in them."""
    times = [mark.t_ns for mark in marks]
    return [any(0 <= item.end_ns - t_ns < item.seconds * 1e9 for t_ns in times) for item in shown]


def _with_axis(lines: list[Text], top: str) -> list[Text]:
    """Put the value of the top before the first line, and 0 before the last."""
    labels = [top, *[""] * (len(lines) - 2), "0"] if len(lines) > 1 else [top]
    return [
        Text(no_wrap=True, end="").append(f"{label:>{_AXIS - 1}.{_AXIS - 1}} ", DIM).append_text(line)
        for label, line in zip(labels, lines, strict=True)
    ]


def _no_iterations(run: Snapshot) -> Text:
    """Return the line above the plot of a run without iterations."""
    line = Text(no_wrap=True, end="")
    if run.iterations.ranks:
        line.append("no iteration yet", HEADER)
    else:
        line.append("no steps recorded" if run.ended else "no steps so far", HEADER)
    if run.throughput:
        last = run.throughput[-1]
        line.append(f"   all interfaces: sent {drawing.gbps(last.tx_bps)} received {drawing.gbps(last.rx_bps)} Gbit/s")
    return line


def _of_node(run: Snapshot, node: str) -> Snapshot:
    """Return the part of a snapshot for one node; all of it for no name. Iterations belong to the whole job."""
    if not node:
        return run
    parts = ("nics", "queues", "hosts", "processes", "gpus", "collectors", "ranks")
    kept: dict[str, Any] = {name: tuple(item for item in getattr(run, name) if item.node == node) for name in parts}
    flows = tuple(item for item in run.flows if node in (_host(item.source), _host(item.destination)))
    own = tuple(line for line in run.output if line.startswith(f"{node}: "))
    return dataclasses.replace(
        run,
        **kept,
        flows=flows if len(run.nodes) > 1 else run.flows,
        nodes=tuple(item for item in run.nodes if item.name == node),
        output=own or run.output,
    )


def _host(end: str) -> str:
    return end.rpartition(":")[0]
