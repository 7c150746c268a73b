"""The live view in a terminal. The only module that needs textual (0.80 to 8)."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.geometry import Size
from textual.widgets import Input, Static

from ringtap.analysis.live.screen import Screenful, ViewState
from ringtap.analysis.live.snapshot import Snapshot
from ringtap.errors import RingtapError
from ringtap.records import JsonLinesWriter
from ringtap.schema import MARKS_JSONL, RUN_JSON
from ringtap.terminal import masked

_EVERY_S = 1.0
_LOOK_S = 0.2
_MESSAGE_S = 6.0


class Poller(threading.Thread):
    """Thread that takes a snapshot every second, so that a slow file system never delays a key.

    Attributes:
        latest: the newest snapshot.
        error: error that ended the polling; None if there was none.
    """

    def __init__(self, take: Callable[[], Snapshot], every_s: float = _EVERY_S) -> None:
        super().__init__(name="live", daemon=True)  # a hung file system must not delay the exit
        self.latest: Snapshot | None = None
        self.error: BaseException | None = None
        self._take, self._every_s, self._end = take, every_s, threading.Event()

    def run(self) -> None:
        """Take snapshots until `stop` is called."""
        due_s = time.monotonic()
        try:
            while not self._end.wait(max(0.0, due_s - time.monotonic())):
                self.latest = self._take()
                due_s = max(due_s + self._every_s, time.monotonic() + self._every_s / 2)
        except Exception as error:  # shown by the main thread, once the terminal is restored
            self.error = error

    def stop(self) -> None:
        """Stop after the current snapshot."""
        self._end.set()


class Lines(Static):
    """Lines that are drawn again only when they change, so that little is sent over a slow connection."""

    def show(self, lines: list[Text]) -> None:
        """Show other lines."""
        for line in lines:
            line.plain = masked(line.plain)  # names and output come from others
        if lines != getattr(self, "_shown", None):
            self._shown = lines
            self.update(Text("\n", no_wrap=True, end="").join(lines))


class LiveApp(App[None]):
    """Terminal application that shows a run.

    Args:
        run: the run directory, for marks.
        latest: returns the newest snapshot; None before the first.
    """

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    CSS = """
    Screen { background: ansi_default; color: ansi_default; overflow: hidden; }
    Lines { height: auto; width: 100%; background: ansi_default; color: ansi_default; }
    #page { height: 1fr; }
    #entry { height: 1; border: none; padding: 0; background: ansi_default; color: ansi_default; display: none; }
    #entry:focus { border: none; }
    """
    # Each has priority, so that a key takes effect before the next one is read: text typed quickly after / or m goes to
    # the entry. While there is an entry, check_action leaves it the keys.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(keys, action, action, priority=True)
        for keys, action in (
            ("q", "quit"),
            ("ctrl+c", "leave"),
            ("question_mark,h,f1", "help"),
            ("s", "sort"),
            ("r", "reverse"),
            ("slash,f", "filter"),
            ("p,space", "pause"),
            ("m", "mark"),
            ("n", "node"),
            ("tab,right", "turn(1)"),
            ("shift+tab,left", "turn(-1)"),
            ("escape", "cancel"),
            ("down,j", "scroll_by(1)"),
            ("up,k", "scroll_by(-1)"),
            ("pagedown", "scroll_by(10)"),
            ("pageup", "scroll_by(-10)"),
            ("home,g", "scroll_by(-1000000)"),
            ("end,G", "scroll_by(1000000)"),
            *((str((number + 1) % 10), f"page({number})") for number in range(10)),
        )
    ]

    def __init__(self, run: Path, latest: Callable[[], Snapshot | None]) -> None:
        super().__init__(ansi_color=True)
        self._run, self._latest = run, latest
        self._shown: Snapshot | None = None
        self._asking: str = ""
        self._terminal: Size | None = None
        self._pressed_ns = 0
        self._message_until_s = 0.0
        self.state = ViewState()

    def compose(self) -> ComposeResult:
        """Yield title, iterations, bar of pages, page, status, and the entry, which takes the status' place."""
        for name in ("title", "top", "bar", "page", "status"):
            yield Lines(id=name)
        yield Input(id="entry")

    def on_mount(self) -> None:
        """Start to look for snapshots."""
        self.set_interval(_LOOK_S, self._look)
        self._look()
        self.draw()

    def on_resize(self, event: Resize) -> None:
        """Draw for the new size, which the app itself learns later."""
        self._terminal = event.size
        self.draw()

    def _look(self) -> None:
        """Show the newest snapshot, unless the view is paused."""
        newest = self._latest()
        expired = self.state.message and time.monotonic() > self._message_until_s
        if expired:
            self.state.message = ""
        if newest is not None and newest is not self._shown and not self.state.paused:
            self._shown = newest
            self.draw()
        elif expired:
            self.draw()

    def draw(self) -> None:
        """Draw the current snapshot with the current settings of the view."""
        screenful = Screenful(self._shown, self.state, *(self._terminal or self.size))
        parts = screenful.parts()
        for widget in self.query(Lines):  # none before the first and after the last moment
            widget.show(parts[str(widget.id)])

    def say(self, text: str) -> None:
        """Show a sentence for some seconds."""
        self.state.message, self._message_until_s = text, time.monotonic() + _MESSAGE_S
        self.draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        """True if a key takes effect: within the entry, only those that leave it."""
        return not self._asking or action in ("leave", "cancel")

    def action_leave(self) -> None:
        """End the view, whatever is being typed."""
        self.exit()

    def action_sort(self) -> None:
        """Sort by the next column."""
        self.state.sort_next()
        self.draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        self.state.reverse()
        self.draw()

    def action_pause(self) -> None:
        """Hold the picture, or update it again; the recording is not affected."""
        self.state.paused = not self.state.paused
        self._look()
        self.draw()

    def action_node(self) -> None:
        """Show the next node alone; after the last one, all nodes."""
        names = [node.name for node in self._shown.nodes] if self._shown else []
        self.state.next_node(names)
        self.draw()

    def action_page(self, number: int) -> None:
        """Show a page."""
        self.state.show_page(number)
        self.draw()

    def action_turn(self, by: int) -> None:
        """Show the next page or the one before."""
        self.state.turn(by)
        self.draw()

    def action_help(self) -> None:
        """Show or hide the keys."""
        self.state.help = not self.state.help
        self.draw()

    def action_scroll_by(self, lines: int) -> None:
        """Move within the page."""
        self.state.scroll(lines)
        self.draw()

    def action_cancel(self) -> None:
        """Leave the entry or the help, or clear the filter."""
        if self._asking:
            self._close_entry()
        elif self.state.help:
            self.state.help = False
        else:
            self.state.words = ""
        self.draw()

    def action_filter(self) -> None:
        """Ask for words that rows must have."""
        self._ask("filter", self.state.words, "words that a row must have; Enter keeps them, Escape leaves")

    def action_mark(self) -> None:
        """Ask for a text to put into the run; the time is that of the key press."""
        self._pressed_ns = time.time_ns()
        self._ask("mark", "", "text of the mark, for this moment; Enter writes it, Escape leaves")

    def _ask(self, what: str, text: str, hint: str) -> None:
        self._asking = what
        entry = self.query_one("#entry", Input)
        entry.placeholder, entry.value = f"{what}: {hint}"[: max(10, self.size.width - 2)], text
        self.query_one("#status", Lines).display = False
        entry.display = True
        self.screen.set_focus(entry)  # at once: the next key is its first letter already

    def _close_entry(self) -> None:
        self._asking = ""
        self.set_focus(None)
        self.query_one("#entry", Input).display = False
        self.query_one("#status", Lines).display = True

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while typing."""
        if self._asking == "filter":
            self.state.words = event.value
            self.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Apply what was typed."""
        asked = self._asking
        self._close_entry()
        if asked == "mark":
            self._write_mark(event.value.strip())
        elif asked == "filter":  # if typed quickly, the entry closes before its change events arrive
            self.state.words = event.value
        self.draw()

    def _write_mark(self, text: str) -> None:
        try:
            (self._run / RUN_JSON).stat()  # a mark must not create a run again that was removed meanwhile
            writer = JsonLinesWriter(self._run / MARKS_JSONL)
            try:
                writer.append({"t_ns": self._pressed_ns, "text": text})
            finally:
                writer.close()
        except OSError as error:
            self.say(f"The mark cannot be written to {self._run}: {error.strerror}")
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
    app = LiveApp(run, lambda: poller.latest)

    def check() -> None:
        if poller.error is not None:
            app.exit()

    def begin(*_: Any) -> None:
        app.set_interval(_LOOK_S, check)

    app.call_later(begin)
    previous = signal.signal(signal.SIGTERM, lambda *_: app.exit())  # leave the terminal as it was
    poller.start()
    try:
        app.run(mouse=False)
    finally:
        poller.stop()
        signal.signal(signal.SIGTERM, previous)
    if poller.error is not None:
        if not isinstance(poller.error, (RingtapError, OSError)):
            raise poller.error
        print(f"ringtap: the view ended: {poller.error}", file=sys.stderr)
    return poller.latest
