"""Implements ``ringtap live``: shows a run in the terminal, as plain lines or in a browser, or serves its metrics."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import socket
import sys
from pathlib import Path
from typing import Any

from ringtap.core import installation
from ringtap.core.command_options import add_metrics
from ringtap.core.errors import UsageError
from ringtap.core.http_listen_address import METRICS_PATH, is_address, listen, listener_or_url, url_of
from ringtap.core.run_directory_schema import PARTS, RUN_JSON, SERIES
from ringtap.core.terminal_escaping import one_line, shell_word

# ringtap run --live starts the view and the run together; a shared file system may show a new folder late
_APPEARS_S = 15.0
_WEB_ADDRESS = ":9465"


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb."""
    description = (
        f"{summary[0].upper()}{summary[1:]}: iteration times, flows, interfaces, queues, host, collectors. "
        "Ending the view does not end the recording."
    )
    parser = subparsers.add_parser(name, help=summary, description=description)
    parser.add_argument(
        "run", type=Path, nargs="?", metavar="DIR", help="the run directory, which may appear a little later"
    )
    parser.add_argument("--plain", action="store_true", help="print one line per second until the run ends")
    parser.add_argument(
        "--web",
        metavar=":PORT",
        nargs="?",
        const=_WEB_ADDRESS,
        help=f"show the view in a browser on this machine, at {_WEB_ADDRESS} unless another port is given",
    )
    add_metrics(parser)
    parser.set_defaults(handler=_live)


def _live(options: argparse.Namespace) -> int:
    if options.run is None and options.web not in (None, _WEB_ADDRESS) and not is_address(options.web):
        options.run, options.web = Path(options.web), _WEB_ADDRESS  # --web DIR, not --web :PORT
    if options.run is None:
        raise UsageError("name the run directory: ringtap live DIR, then --web or --metrics ADDRESS if you want these")
    # first, so that a missing package or a used port is reported before the wait for a run
    chosen = [name for name in ("--plain", "--web", "--metrics") if getattr(options, name[2:])]
    if len(chosen) > 1:
        raise UsageError(f"{' and '.join(chosen)} are different views: give one of them")
    if options.metrics:
        where = listener_or_url(options.metrics, options.metrics_public)
        if isinstance(where, str):
            return _send_metrics(options.run, where)
        with where:
            return _serve_metrics(options.run, where)
    if options.web:
        with listen("--web", options.web) as listener:
            return _serve_page(options.run, listener)
    watch = None if options.plain else _import_view("terminal_app").watch
    path = _wait_for(options.run, _APPEARS_S)

    from ringtap.analysis.live.build_snapshot import SnapshotSource
    from ringtap.analysis.live.follow_run import lower_priority
    from ringtap.analysis.live.plain import follow_plain, say_next

    lower_priority()
    source = SnapshotSource(path)
    if watch is None:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the plain view
            follow_plain(source.take, sys.stdout)
        return 0
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            f"this is not a terminal: ringtap live --plain {shell_word(options.run)} prints one line per second instead"
        )
    say_next(watch(source.take, path), _next_verb(path, options.run), str(options.run))
    return 0


def _serve_metrics(run: Path, listener: socket.socket) -> int:
    """Serve metrics of all nodes of a run until it ends."""
    path = _wait_for(run, _APPEARS_S)

    from ringtap.analysis.live.follow_run import lower_priority
    from ringtap.analysis.live.metrics import MetricsHttpServer, RunMetrics

    lower_priority()
    metrics = RunMetrics(path)
    print(f"Metrics at {url_of(listener, METRICS_PATH)}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it
        MetricsHttpServer(metrics, listener).serve_while(metrics.is_running)
        _say_ended(path, run)
    return 0


def _send_metrics(run: Path, url: str) -> int:
    """Send metrics of all nodes of a run to an OpenTelemetry Collector until the run ends."""
    path = _wait_for(run, _APPEARS_S)

    from ringtap.analysis.live.follow_run import lower_priority
    from ringtap.analysis.live.metrics import RunMetrics
    from ringtap.analysis.live.otlp import OtlpSender

    lower_priority()
    metrics = RunMetrics(path)
    sender = OtlpSender(metrics, path, "", url)
    print(f"Metrics to {url} every {sender.every_s:g} s", flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends it
        sender.send_until(lambda: not metrics.is_running())
        _say_ended(path, run)
    return 0


def _say_ended(path: Path, run: Path) -> None:
    print(f"The run has ended. Next: ringtap {_next_verb(path, run)} {shell_word(run)}", file=sys.stderr)


def _serve_page(run: Path, listener: socket.socket) -> int:
    """Serve the live view to browsers until Ctrl-C."""
    web = _import_view("web")
    path = _wait_for(run, _APPEARS_S)

    from ringtap.analysis.live.build_snapshot import SnapshotSource
    from ringtap.analysis.live.follow_run import lower_priority
    from ringtap.analysis.live.plain import say_next

    lower_priority()
    say_next(web.serve_page(SnapshotSource(path).take, listener, path), _next_verb(path, run), str(run))
    return 0


def _next_verb(shown: Path, run: Path) -> str:
    """Return the command for a run that was watched, or for the sweep that has it."""
    return "analyze" if shown == run else "report"


def _import_view(name: str) -> Any:
    try:
        return importlib.import_module(f"ringtap.analysis.live.{name}")
    except ImportError as error:
        missing = installation.missing(error)
        if missing is None:
            raise
        raise UsageError(f"{missing}, or use --plain: the live view needs it") from error


def _wait_for(path: Path, seconds: float) -> Path:
    """Wait for a run directory to appear, and return it; for a sweep, return its newest series.

    Raises:
        UsageError: no run directory within ``seconds``, one of a newer schema, or a sweep without a series.
    """
    from ringtap.core.run_directory import RunDirectory

    if path.exists() and not path.is_dir():
        RunDirectory.open(path)  # which says so
    if not (path / RUN_JSON).is_file():
        print(f"Waiting up to {seconds:g} s for {path} …", file=sys.stderr)
    run = RunDirectory.wait_for(path, seconds)
    if run.info.get("kind") == "sweep":
        status, why = str(run.info.get("status")), one_line(str(run.info.get("why") or ""))
        ended = "" if status == "running" else f"has ended: {status}{f', {why}' if why else ''}"
        folders = (SERIES, f"{PARTS}/*/{SERIES}")
        series = [one for folder in folders for one in path.glob(f"{folder}/*/{RUN_JSON}") if one.is_file()]
        if not series:
            later = "has no series yet: try again when it measures, ringtap status says when"
            raise UsageError(f"{path} is a sweep that {ended or later}")
        newest = RunDirectory.open(max(series, key=lambda item: item.stat().st_mtime).parent).path
        if ended:
            print(f"{path} is a sweep that {ended}. This is its newest series, {newest.name}", file=sys.stderr)
        return newest
    return path
