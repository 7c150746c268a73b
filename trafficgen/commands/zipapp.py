"""Implements ``ringtap traffic zipapp``: writes the traffic generator as one file, for nodes without ringtap."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import zipapp
from pathlib import Path
from typing import Any

import ringtap
from ringtap.core.command_options import add_force
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import shell_word
from ringtap.core.units import format_size
from ringtap.core.untrusted_files import refuse_existing

_MAIN = """\
import sys

if sys.version_info < (3, 10):
    sys.exit("ringtap: this file needs Python 3.10 or newer, and this is " + sys.version.split()[0])
from ringtap.cli import main

sys.exit(main(["traffic", *sys.argv[1:]]))
"""


def register(verbs: Any, name: str, summary: str) -> None:
    """Add the ``zipapp`` sub-verb."""
    parser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    usual = Path("ringtap-traffic.pyz")
    parser.add_argument("-o", "--output", type=Path, default=usual, metavar="FILE", help=f"file to write ({usual})")
    add_force(parser)
    parser.set_defaults(handler=_zipapp)


def _zipapp(options: argparse.Namespace) -> int:
    path: Path = options.output
    refuse_existing(path, options.force)
    write_archive(path)
    print(f"Wrote {path} ({format_size(path.stat().st_size)})")
    name = shell_word(path.name)
    print(f"Next: copy it to the nodes, and there: python3 {name} serve --bind HOST:PORT --token-file FILE")
    return 0


def write_archive(path: Path) -> None:
    """Write the traffic generator as one executable file.

    Raises:
        UsageError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _copy_modules(Path(folder))
            zipapp.create_archive(folder, temporary, interpreter="/usr/bin/env python3", compressed=True)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _copy_modules(folder: Path) -> None:
    package = Path(ringtap.__file__).parent
    modules = [package / "__init__.py", package / "cli.py"]
    for name in ("core", "trafficgen"):
        modules += sorted((package / name).rglob("*.py"))
    for module in modules:
        copy = folder / "ringtap" / module.relative_to(package)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(module, copy)
    (folder / "__main__.py").write_text(_MAIN)
