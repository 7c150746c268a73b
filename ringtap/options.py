"""Options of the command line that several verbs share."""

from __future__ import annotations

from argparse import ArgumentParser


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def add_force(parser: ArgumentParser) -> None:
    """Add ``--force``."""
    parser.add_argument("--force", action="store_true", help="overwrite existing files")


def add_verbose(parser: ArgumentParser) -> None:
    """Add ``-v`` for verbs that have settings."""
    parser.add_argument("-v", "--verbose", action="store_true", help="print the settings first")
