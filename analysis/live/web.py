"""Shows a run in a browser: a page on this machine's loopback address, updated by server-sent events.

The page itself holds nothing of the run. A browser reads the run, or marks a moment of it, after it has proved that it
knows the page's token: it gets a challenge, and answers with HMAC-SHA-256 of the challenge under the token (RFC 2104).
So the token, which the URL has behind ``#``, is never sent, and who listens at the port later does not learn it.
"""

from __future__ import annotations

import contextlib
import getpass
import hmac
import json
import os
import secrets
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ringtap.analysis.live.bounded_http_server import TEXT, ListeningHttpServer, QuietHandler
from ringtap.analysis.live.follow_run import write_mark
from ringtap.analysis.live.poller import Poller
from ringtap.analysis.live.snapshot import Snapshot
from ringtap.analysis.live.snapshot_for_browser import TableChoice, parts_of
from ringtap.core.errors import UsageError, error_message
from ringtap.core.http_listen_address import url_of
from ringtap.core.installation import state_folder

_STATIC = Path(__file__).parent / "static"
_FILES = {"/": "live.html", "/live.css": "live.css", "/live.js": "live.js"}
_TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TOKEN_BYTES = 24
_MIN_CHARACTERS = 32
_CHALLENGE_S = 60.0  # in which a challenge can be answered
_LOOK_S = 0.2
BEAT_S = 5.0  # an event at least as often, so that either side notices that the other is gone
_MAX_FIELDS = 8
_MAX_MARK_BYTES = 10_000
_MAX_AGE_S = 86_400.0  # from the marked moment until its text is typed


def token_file(port: int) -> Path:
    """Return the file of the token of pages at a port."""
    return state_folder() / f"live-{port}.token"


def read_token(path: Path) -> str:
    """Return the token that a file holds; the first call makes it, and it stays, so that open pages can come back.

    Raises:
        UsageError: the file cannot be made or read, another user can read it, or it holds no token.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "x", opener=partial(os.open, mode=0o600)) as file:
            file.write(secrets.token_urlsafe(_TOKEN_BYTES))
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            token = file.read(4 * _MIN_CHARACTERS).strip().decode("ascii", "replace")
    except OSError as error:
        raise UsageError(f"{path}, which holds the page's token, cannot be used: {error_message(error)}") from error
    is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not is_private or len(token) < _MIN_CHARACTERS:
        raise UsageError(f"{path} is not a token that you alone can read: remove it")
    return token


def tunnel_command(listener: socket.socket) -> str:
    """Return the command that brings the page to a user's own machine, where the URL is then the same."""
    host, port = listener.getsockname()[:2]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user ID without a name, as in some containers
        user = "USER"
    return f"ssh -N -L {port}:{f'[{host}]' if ':' in host else host}:{port} {user}@{socket.gethostname()}"


class Challenges:
    """Challenges to browsers that want to read the run; each is good for one right answer within a minute.

    A challenge holds its time and a signature, so that nothing is kept of those that nobody answers, however many.

    Args:
        token: the secret that a browser must know.
    """

    def __init__(self, token: str) -> None:
        self._token, self._key = token.encode(), secrets.token_bytes(_TOKEN_BYTES)
        self._answered: dict[str, float] = {}  # with the times; only who knows the token adds to them
        self._lock = threading.Lock()

    def new(self) -> str:
        """Return a new challenge."""
        text = f"{secrets.token_urlsafe(_TOKEN_BYTES)}.{time.monotonic():.3f}"
        return f"{text}.{_signature(self._key, text)}"

    def is_answered(self, challenge: str, proof: str) -> bool:
        """Return True if a proof is right for a challenge that is still open; it is open no more."""
        text, _, signature = challenge.rpartition(".")
        if not hmac.compare_digest(_signature(self._key, text).encode(), signature.encode()):
            return False
        now_s, begin_s = time.monotonic(), float(text.partition(".")[2])
        is_right = hmac.compare_digest(_signature(self._token, challenge).encode(), proof.encode())
        if not is_right or now_s - begin_s > _CHALLENGE_S:
            return False
        with self._lock:
            self._answered = {one: at_s for one, at_s in self._answered.items() if now_s - at_s <= _CHALLENGE_S}
            is_first = challenge not in self._answered
            self._answered[challenge] = now_s
        return is_first


def _signature(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()


class PageServer(ListeningHttpServer):
    """HTTP server of the page.

    Args:
        listener: the listening socket.
        token: the page's token.
        run: the run directory, for marks.
        latest: returns the newest snapshot; None before the first.
    """

    def __init__(self, listener: socket.socket, token: str, run: Path, latest: Callable[[], Snapshot | None]) -> None:
        super().__init__(listener, _PageHandler)
        self.challenges, self.run, self.latest = Challenges(token), run, latest


class _PageHandler(QuietHandler):
    server: PageServer

    def end_headers(self) -> None:
        """Add the headers of every answer."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def do_GET(self) -> None:  # noqa: N802
        """Answer with a file of the page, a challenge, or the events."""
        path, _, query = self.path.partition("?")
        if path in _FILES:
            file = _STATIC / _FILES[path]
            self.answer(200, _TYPES[file.suffix], file.read_bytes())
        elif path == "/challenge":
            self.answer(200, TEXT, self.server.challenges.new().encode())
        elif path == "/events":
            self._answer_events(query)
        else:
            self.answer(404, TEXT, b"The page is at /\n")

    def do_POST(self) -> None:  # noqa: N802
        """Mark a moment of the run for a browser that knows the token."""
        self.close_connection = True  # what follows may be the rest of a body
        try:
            size, now_ns = int(self.headers.get("Content-Length") or 0), time.time_ns()
            fields = _fields(self.rfile.read(size if 0 <= size <= _MAX_MARK_BYTES else 0).decode())
            age_s = float(fields["age_s"])
        except (KeyError, ValueError):
            age_s = -1.0
        if self.path != "/mark" or not 0 <= age_s <= _MAX_AGE_S:
            self.answer(400, TEXT, b"The mark cannot be read\n")
        elif self._is_proven(fields):
            try:
                write_mark(self.server.run, now_ns - round(age_s * 1e9), fields.get("text", ""))
            except UsageError as error:
                self.answer(500, TEXT, str(error).encode(errors="replace"))
            else:
                self.answer(200, TEXT, b"")

    def _is_proven(self, fields: dict[str, str]) -> bool:
        """Refuse a request of who does not know the token."""
        is_proven = self.server.challenges.is_answered(fields.get("challenge", ""), fields.get("proof", ""))
        if not is_proven:
            self.answer(403, TEXT, b"The token is wrong\n")
        return is_proven

    def _answer_events(self, query: str) -> None:
        """Stream the events to a browser that knows the token."""
        try:
            fields = _fields(query)
            page, column, order = fields.get("sort", ",0,").rsplit(",", 2)
            rows = fields.get("words", ""), page, int(column), order == "descending"
            choice = TableChoice(*rows, node=fields.get("node", ""))
        except ValueError:
            self.answer(400, TEXT, b"The choice of rows cannot be read\n")
            return
        if not self._is_proven(fields):
            return
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self._stream(choice)

    def _stream(self, choice: TableChoice) -> None:
        """Send the parts that have changed, until the browser goes away."""
        sent: dict[str, Any] = {}
        shown, sent_s, tunnel = None, time.monotonic(), tunnel_command(self.server.socket)
        while True:
            newest, changed = self.server.latest(), {}
            if newest is not None and newest is not shown:
                parts = parts_of(newest, choice) | {"tunnel": tunnel}
                changed = {name: part for name, part in parts.items() if sent.get(name) != part}
                shown, sent = newest, parts
            if changed or time.monotonic() - sent_s >= BEAT_S:
                self.wfile.write(b"data: %s\n\n" % json.dumps(changed, separators=(",", ":")).encode())
                sent_s = time.monotonic()
            self.wfile.flush()
            time.sleep(_LOOK_S)


def _fields(text: str) -> dict[str, str]:
    """Return the fields of a query or a form.

    Raises:
        ValueError: there are too many.
    """
    return {name: values[0] for name, values in parse_qs(text, max_num_fields=_MAX_FIELDS).items()}


def serve_page(take: Callable[[], Snapshot], listener: socket.socket, run: Path) -> Snapshot | None:
    """Print the page's URL, and serve the page until Ctrl-C.

    Args:
        take: returns a new snapshot; called from a thread of its own, once a second.
        listener: the listening socket.
        run: the run directory, for marks.

    Returns:
        The last snapshot; None if none was taken.

    Raises:
        UsageError: as `read_token`.
        Exception: polling ended in an error other than RingtapError and OSError, which are only printed.
    """
    path = token_file(listener.getsockname()[1])
    token = read_token(path)
    poller = Poller(take)
    poller.start()
    with contextlib.suppress(KeyboardInterrupt):
        # a terminal forgets the token; a file would keep it
        is_terminal = sys.stdout.isatty()
        print(f"Live view at {url_of(listener, f'/#{token}' if is_terminal else '/')}", flush=True)
        if not is_terminal:
            print(f"The page asks for the token in {path}", file=sys.stderr)
        print(f"From another machine, first: {tunnel_command(listener)}", file=sys.stderr)
        PageServer(listener, token, run, lambda: poller.latest).serve_while(lambda: poller.error is None)
    return poller.finish()
