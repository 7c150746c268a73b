"""Copies of files on a node's own disk that match patterns."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# cp is fast for large files, and handles links, sparse files and time stamps correctly
_COPY = ["cp", "--recursive", "--parents", "--preserve=timestamps", "--"]
_AT_ONCE = 200  # paths per command line


def keep(folder: Path, patterns: Sequence[str], to: Path) -> None:
    """Copy the files and folders that match patterns, with their parents and time stamps.

    Files that cannot be copied are reported on standard error.

    Args:
        folder: folder to which the patterns are relative.
        patterns: patterns of `matching`.
        to: folder to copy to; it is created if missing.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        paths = matching(folder, pattern)
        if not paths and not glob.has_magic(pattern):
            print(f"ringtap: there is no {folder / pattern} to keep", file=sys.stderr)
        found |= {path.rstrip("/"): path for path in paths}
    # a folder is copied with all its content, so paths below it are dropped
    paths = [path for name, path in found.items() if not any(str(above) in found for above in Path(name).parents)]
    # one cp per folder, as a single cp skips a folder that it finds twice, also by a link
    folders = {path for path in paths if (folder / path).is_dir()}
    files = [path for path in paths if path not in folders]
    try:
        to.mkdir(parents=True, exist_ok=True)
        for some in (*([path] for path in folders), *(files[n : n + _AT_ONCE] for n in range(0, len(files), _AT_ONCE))):
            subprocess.run([*_COPY, *some, to], cwd=folder, check=False)
    except OSError as error:
        print(f"ringtap: {to} cannot be written: {error.strerror}", file=sys.stderr)


def matching(folder: Path, pattern: str) -> list[str]:
    """Return the paths below a folder that match a pattern, as in bash with the option ``globstar``.

    ``**`` matches any number of folders except hidden ones and links; at the end of a pattern, it matches the folder
    itself.
    """
    part = re.sub(r"(/\*\*)+/?$", "/", f"/{pattern}")[1:].replace("[^", "[!") or "*"
    first, globstar, rest = f"/{part}".partition("/**/")
    if not globstar:
        found = sorted(glob.glob(part, root_dir=folder))  # noqa: PTH207 (keeps a slash, with which cp follows a link)
        return [path.rstrip("/") for path in found] if glob.has_magic(part) and part[-1] != pattern[-1] else found
    found = []
    for above in matching(folder, f"{first[1:]}/") if first else [""]:
        for path, names, _ in os.walk(folder / above):
            names[:] = sorted(name for name in names if not name.startswith("."))
            here = "" if Path(path) == folder else os.path.relpath(path, folder)
            found += [os.path.join(here, match) for match in matching(Path(path), rest)]  # noqa: PTH118 (keeps a slash)
    return found
