"""Implements ``ringtap completion``: prints a script with which a shell completes verbs, options and files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``completion`` verb."""
    parser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.add_argument("shell", choices=SHELLS, help="the shell that reads the script")
    parser.set_defaults(handler=_print_script)


def _print_script(options: argparse.Namespace) -> int:
    import shtab

    from ringtap.cli import build_whole_parser

    parser = build_whole_parser()
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, options.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    """Let every argument that is a path complete to files, in all verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                _complete_files(verb, files)
        elif action.type is Path:
            action.complete = files  # type: ignore[attr-defined]
