"""Shows the live view in a terminal. Only this module needs textual (0.80 to 8; before 7.3, bars are one line high)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.strip import Strip
from textual.widgets import DataTable, Footer, Input, Sparkline, Static, TabbedContent, TabPane

from ringtap.analysis.live import summary, tables
from ringtap.analysis.live.follow_run import write_mark
from ringtap.analysis.live.poller import Poller
from ringtap.analysis.live.snapshot import Snapshot
from ringtap.analysis.live.tables import DIM, Page
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import masked

_POLL_S = 0.2
_MESSAGE_S = 6.0
_ALWAYS = (tables.NICS, tables.FLOWS)
_TWO_PLOTS = 110
_CAUSE_LINES, _VERDICT_LINES = 6, 2
_HELP = """\
1 … 9, 0, Tab, ← → page; ↑ ↓ PgUp PgDn Home End move within it
s  r               sort by the next column; reverse the order
/                  show only rows with these words (Enter keeps, Escape clears)
n                  one node after the other, then all
p                  pause or resume the view (the recording continues)
m                  mark this moment: the text goes into the run's marks.jsonl
q                  leave; the recording and the job continue

Iterations  • over 1.5 times the median; ▲ over 3 times, bar cut; × optimizer
            step skipped; ▾ a mark
Ranks       yellow: the others wait for it, as the verdict above says
Flows       yellow: segments were retransmitted. The sender describes a flow; if
            only the receiver's node records, RTT, cwnd, delivery are not known.
backlog     the largest of the last second
behind      how much later than the first rank a rank ended the last iteration
missed      samples that were due and not taken; lost: records or packets lost"""


class Lines(Static):
    """Lines that are drawn again only when they change, so that little is sent over a slow connection."""

    shown: tuple[Text, ...] = ()

    def show(self, *lines: Text) -> None:
        """Replace the lines; without any, hide the widget."""
        for line in lines:
            line.plain = masked(line.plain)  # names and output may contain control characters
        if lines != self.shown:
            self.shown = lines
            self.update(Text("\n").join(lines))
        self.display = bool(lines)


def _joined(strip: Strip) -> Strip:
    """Join neighbours of one style, because a style costs more than a character on its way to the terminal."""
    plain = (Segment(segment.text, (segment.style or Style()).clear_meta_and_links()) for segment in strip)
    return Strip(plain).simplify()


class Bars(Sparkline):
    """A sparkline that costs little on its way to the terminal."""

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
        return _joined(super().render_line(y))


class RunTable(DataTable[Text]):
    """Table of a page.

    It holds only the visible rows, because a run may have thousands and DataTable measures each, and it updates only
    the cells that differ.

    Args:
        page: the page.

    Attributes:
        items: all items, in order.
        scrolled: number of items before the first visible one; on a page from the end, after the last visible one.
    """

    def __init__(self, page: Page) -> None:
        super().__init__(show_cursor=False, cell_padding=0)
        self.page = page
        self.items: list[Any] = []
        self.scrolled = 0
        self._sort, self._descending = page.sort, page.descending
        self._run: Snapshot | None = None
        self._words = ""
        self._rows: list[list[tuple[str, str]]] = []

    def show(self, run: Snapshot, words: str) -> None:
        """Show the rows of a run that have these words."""
        self._run, self._words = run, words
        self.items = self.page.select(run, words, self._sort, self._descending)
        self.styles.max_height = max(1, len(self.items)) + 1
        self.on_resize()

    def on_resize(self) -> None:
        """Show the visible rows, or the reason why there are none."""
        visible = self.size.height - 1
        if self._run is None or visible < 1:
            return
        self.scrolled = max(0, min(self.scrolled, len(self.items) - visible))
        first = max(0, len(self.items) - visible - self.scrolled) if self.page.from_end else self.scrolled
        items = self.items[first : first + visible]
        heads = [column.title for column in self.page.columns]
        if self._sort is not None:
            heads[self._sort] += "▼" if self._descending else "▲"
        texts = [heads, *([masked(column.text(item)) for column in self.page.columns] for item in items)]
        texts = self.page.lay_out(texts, self.size.width, self._sort)
        styles = ["", *(self.page.style(item, self._run) for item in items)]
        if not items:
            lines = self.page.title, masked(self.page.reason(self._run, self._words))
            texts, styles = [[tables.cell(line, self.size.width)] for line in lines], ["", DIM]
        self._fill([[(text, style) for text in row] for row, style in zip(texts, styles, strict=True)])

    def _fill(self, rows: list[list[tuple[str, str]]]) -> None:
        """Change the table to these rows; the first row is the head."""
        if rows[:1] != self._rows[:1] or len(rows) != len(self._rows):
            self.clear(columns=True)
            for number, (head, _) in enumerate(rows[0]):
                self.add_column(Text(head), key=str(number))
            for number, row in enumerate(rows[1:], 1):
                self.add_row(*(Text(*cell) for cell in row), key=str(number))
        else:
            for number, row in enumerate(rows):
                for column, (cell, before) in enumerate(zip(row, self._rows[number], strict=True)):
                    if cell != before:
                        self.update_cell(str(number), str(column), Text(*cell))
        self._rows = rows

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen."""
        return _joined(super().render_line(y))

    def resort(self, reverse: bool) -> None:
        """Reverse the order, or sort by the next column, which then stays visible."""
        if reverse:
            self._descending = not self._descending
        elif len(self.page.columns) > 1:
            self._sort = 0 if self._sort is None else (self._sort + 1) % len(self.page.columns)


class LiveApp(App[None]):
    """Terminal application that shows a run.

    Args:
        run: the run directory, for marks.
        latest: returns the newest snapshot; None before the first.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    CSS = """
    * { background: ansi_default; color: ansi_default; overflow: hidden; scrollbar-size: 0 0; }
    Lines { height: auto; max-height: 3; }
    #help { max-height: 100%; display: none; }
    #plots { height: 4; }
    Bars { height: 1fr; }
    Bars > .sparkline--min-color, Bars > .sparkline--max-color { color: green; }
    #throughput Bars > .sparkline--min-color, #throughput Bars > .sparkline--max-color { color: darkcyan; }
    #throughput { dock: right; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; padding: 0; }
    Tabs, #tabs-list { height: 1; min-height: 1; }
    Tab { padding: 0 1 0 0; text-style: dim; }
    Tab.-active { text-style: reverse; padding: 0; margin: 0 1 0 0; }
    Underline { display: none; }
    DataTable { height: 1fr; min-height: 2; }
    DataTable > .datatable--header { background: ansi_default; color: ansi_default; text-style: bold; }
    DataTable > .datatable--even-row, DataTable > .datatable--odd-row { background: ansi_default; }
    #note { text-style: bold; }
    FooterKey .footer-key--description { text-style: dim; }
    Input, Input:focus { height: 1; border: none; padding: 0; display: none; }
    """
    # All have priority, so that a key takes effect before the next one is read: text typed quickly after / or m goes to
    # the input. While the input is open, check_action disables the keys, so that they go to the input.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(keys, action, shown, show=bool(shown), priority=True)
        for keys, action, shown in (
            ("s", "sort(False)", "sort"),
            ("r", "sort(True)", "reverse"),
            ("slash,f", "filter", "filter"),
            ("n", "node", "node"),
            ("p,space", "pause", "pause"),
            ("m", "mark", "mark"),
            ("question_mark,h,f1", "help", "help"),
            ("q", "quit", "quit"),
            ("ctrl+c", "leave", ""),
            ("escape", "cancel", ""),
            ("tab,right", "turn(1)", ""),
            ("shift+tab,left", "turn(-1)", ""),
            ("down,j", "move(1)", ""),
            ("up,k", "move(-1)", ""),
            ("pagedown", "move(10)", ""),
            ("pageup", "move(-10)", ""),
            ("home,g", "move(-1000000)", ""),
            ("end,G", "move(1000000)", ""),
            *((str((number + 1) % 10), f"page({number})", "") for number in range(len(tables.TABLES) + 1)),
        )
    ]

    def __init__(self, run: Path, latest: Callable[[], Snapshot | None]) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self._run, self._latest = run, latest
        self._shown: Snapshot | None = None
        self._is_drawn = False
        self._input_purpose = ""
        self._pressed_ns = 0
        self._message, self._message_until_s = "", 0.0
        self._page = 0
        self.node = ""
        self.words = ""
        self.paused = False

    def compose(self) -> ComposeResult:
        """Yield the status, verdict, plots, pages, help, line of notes, and the input that replaces that line."""
        yield Lines(id="headline")
        yield Lines(id="verdict")
        with Horizontal(id="plots"):
            for name in ("iterations", "throughput"):
                with Vertical(id=name):
                    yield Lines()
                    yield Bars()
        with TabbedContent():
            with TabPane("1 All", id="page0"):
                for page in tables.OVERVIEW:
                    yield RunTable(page)
                yield Lines(id="states")
            for number, page in enumerate(tables.TABLES, 1):
                with TabPane(f"{(number + 1) % 10} {page.title}", id=f"page{number}"):
                    yield RunTable(page)
        yield Lines(id="help")
        yield Lines(id="note")
        yield Input()
        yield Footer()

    def on_mount(self) -> None:
        """Start to poll for snapshots."""
        self.query_one("#headline", Lines).show(Text("Looking …"))
        self.set_interval(_POLL_S, self._poll_snapshot)
        self._poll_snapshot()

    def on_resize(self, event: Resize) -> None:
        """Give the plots more lines on a larger terminal."""
        height = event.size.height
        lines = 0 if height < 10 else 2 if height < 20 else 4 if height < 32 else 6 if height < 44 else 9
        self.query_one("#plots").styles.height = lines
        self.call_after_refresh(self.draw)  # the app's own size changes after this event

    def _poll_snapshot(self) -> None:
        """Show the newest snapshot, unless the view is paused."""
        if self._message and time.monotonic() > self._message_until_s:
            self.say("")
        newest = self._latest()
        if newest is not None and not self.paused and (newest is not self._shown or not self._is_drawn):
            self._shown = newest
            self.draw()

    def draw(self) -> None:
        """Show the current snapshot with the current settings of the view; only the visible page is updated."""
        if not self._is_complete:
            return
        if not self._is_drawn:  # the footer shows keys only once they take effect
            self._is_drawn = True
            self.refresh_bindings()
        run = self._shown
        notes = [f"filter: {self.words}"] if self.words else []
        notes += [f"{summary.ending(run)} q quit, then: ringtap analyze"] if run is not None and run.ended else []
        note = self._message or "  ".join(notes)
        self.query_one("#note", Lines).show(*([Text(note)] if note and not self._input_purpose else []))
        if run is None:
            return
        run = tables.of_node(run, self.node)
        self.query_one("#headline", Lines).show(summary.headline(run, self.paused), summary.job_line(run, self.node))
        verdict = self.query_one("#verdict", Lines)
        verdict.show(*summary.verdict_lines(run))
        most = _CAUSE_LINES if run.diagnosis.causes else _VERDICT_LINES
        verdict.styles.max_height = max(1, min(most, (self.size.height - 12) // 2))
        stepped = bool(run.iterations.history)
        both = stepped and self.size.width >= _TWO_PLOTS
        width = self.size.width // 2 - 1 if both else self.size.width
        for name, plot, wanted in (
            ("#iterations", summary.iteration_plot, stepped),
            ("#throughput", summary.throughput_plot, both or not stepped),
        ):
            line, bars = plot(run, width)
            self.query_one(name).display, self.query_one(name).styles.width = wanted, width
            self.query_one(f"{name} Lines", Lines).show(line)
            self.query_one(f"{name} Bars", Bars).data = bars
        self.query_one("#states", Lines).show(*summary.collector_states(run.collectors))
        run = tables.busiest(run) if self._page == 0 else run
        for table in self._tables:
            table.show(run, self.words)
            table.display = bool(table.items) or self._page > 0 or table.page in _ALWAYS

    @property
    def _is_complete(self) -> bool:
        """True if all tabs and tables exist, which they do not while the application starts or ends."""
        return len(self.query("Tab, RunTable")) == len(tables.OVERVIEW) + 2 * len(tables.TABLES) + 1

    @property
    def _tables(self) -> list[RunTable]:
        return list(self.query(f"#page{self._page} RunTable").results(RunTable))

    def say(self, text: str) -> None:
        """Show a sentence for some seconds."""
        self._message, self._message_until_s = text, time.monotonic() + _MESSAGE_S
        self.draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """Return True if a key takes effect; while the input is open, only keys that close it do."""
        return action == "leave" or (self._is_complete and (not self._input_purpose or action == "cancel"))

    def action_leave(self) -> None:
        """End the view, even while text is being typed."""
        self.exit()

    def action_sort(self, reverse: bool) -> None:
        """Sort by the next column, or reverse the order; the overview has a fixed order."""
        for table in self._tables if self._page else []:
            table.resort(reverse)
        self.draw()

    def action_move(self, rows: int) -> None:
        """Move within the page."""
        for table in self._tables if self._page else []:
            table.scrolled = max(0, table.scrolled + (-rows if table.page.from_end else rows))
        self.draw()

    def action_pause(self) -> None:
        """Pause or resume the view; the recording is not affected."""
        self.paused = not self.paused
        self._poll_snapshot()
        self.draw()

    def action_node(self) -> None:
        """Show the next node alone; after the last one, all nodes."""
        names = ["", *(node.name for node in self._shown.nodes)] if self._shown else [""]
        self.node = names[(names.index(self.node) + 1) % len(names)] if self.node in names else ""
        self.action_page(self._page)

    def action_page(self, number: int) -> None:
        """Show a page from its first row."""
        self._page, self.query_one(TabbedContent).active = number, f"page{number}"
        for table in self._tables:
            table.scrolled = 0
        self._show_help(False)
        self.draw()

    def action_turn(self, by: int) -> None:
        """Show the next or the previous page."""
        self.action_page((self._page + by) % (len(tables.TABLES) + 1))

    def action_help(self) -> None:
        """Show or hide the keys."""
        self._show_help(not self.query_one("#help").display)

    def _show_help(self, shown: bool) -> None:
        self.query_one("#help", Lines).show(*map(Text, _HELP.splitlines() if shown else ()))
        self.query_one(TabbedContent).display = not shown

    def action_cancel(self) -> None:
        """Close the input or the help, or clear the filter."""
        if self._input_purpose:
            self._close_input()
        elif self.query_one("#help").display:
            self._show_help(False)
        else:
            self.words = ""
        self.draw()

    def action_filter(self) -> None:
        """Ask for words that rows must have."""
        self._ask("filter", self.words, "words that a row must have; Enter keeps them, Escape leaves")

    def action_mark(self) -> None:
        """Ask for the text of a mark; its time is that of the key press."""
        self._pressed_ns = time.time_ns()
        self._ask("mark", "", "text of the mark, for this moment; Enter writes it, Escape leaves")

    def _ask(self, what: str, text: str, hint: str) -> None:
        self._input_purpose = what
        field = self.query_one(Input)
        field.placeholder, field.value = f"{what}: {hint}"[: max(10, self.size.width - 2)], text
        field.display = True
        self.screen.set_focus(field)  # immediately: the next key may be the first letter of the text
        self.draw()

    def _close_input(self) -> None:
        self._input_purpose = ""
        self.set_focus(None)
        self.query_one(Input).display = False

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while typing."""
        if self._input_purpose == "filter":
            self.words = event.value
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Apply what was typed."""
        purpose = self._input_purpose
        self._close_input()
        if purpose == "mark":
            self._write_mark(event.value.strip())
        elif purpose == "filter":  # if typed quickly, the input closes before its change events arrive
            self.words = event.value
            self.draw()

    def _write_mark(self, text: str) -> None:
        try:
            write_mark(self._run, self._pressed_ns, text)
        except UsageError as error:
            self.say(str(error))
        else:
            self.say(f"Marked: {text}" if text else "Marked")


def watch(take: Callable[[], Snapshot], run: Path) -> Snapshot | None:
    """Show a run until the user leaves.

    Args:
        take: returns a new snapshot; called from a thread of its own, once a second.
        run: the run directory.

    Returns:
        The last snapshot; None if none was taken.

    Raises:
        Exception: polling ended in an error other than RingtapError and OSError, which are only printed.
    """
    for name in ("LINES", "COLUMNS"):  # if a launcher exports them, they override the terminal's own size
        os.environ.pop(name, None)
    poller = Poller(take)

    def latest() -> Snapshot | None:
        if poller.error is not None:
            app.exit()
        return poller.latest

    app = LiveApp(run, latest)
    previous = signal.signal(signal.SIGTERM, lambda *_: app.exit())  # leave the terminal as it was
    poller.start()
    try:
        app.run(mouse=False)
    finally:
        signal.signal(signal.SIGTERM, previous)
        newest = poller.finish()
    return newest
