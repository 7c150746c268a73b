"""Describes this installation of ringtap: the command that adds a missing package to it, its folders and examples.

No package index offers ringtap, so pip needs more than its name.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ringtap.core.errors import UsageError

# package -> the extra of pyproject.toml that installs it; empty: ringtap always needs it
EXTRAS = {
    **dict.fromkeys(("jinja2", "llvmlite", "matplotlib", "numba", "numpy", "pandas", "pyarrow", "scipy"), "report"),
    **dict.fromkeys(("pyparsing", "zstandard"), "report"),
    **dict.fromkeys(("rich", "textual"), "tui"),
    **dict.fromkeys(("cryptography", "dask", "dask_jobqueue", "distributed"), "dask"),
    **dict.fromkeys(("psutil", "pyroute2", "tomli"), ""),
    **dict.fromkeys(("dpkt", "scapy"), "packets"),
    **dict.fromkeys(("torchvision", "transformers"), "models"),
    **dict.fromkeys(("opentelemetry", "prometheus_client"), "metrics"),
    "crc32c": "tensorboard",
    "duckdb": "duckdb",
    "perfetto": "perfetto",
    "pynvml": "gpu",
    "shtab": "completion",
}


def missing(error: ImportError) -> str | None:
    """Name the package that an import lacked and the command that installs it.

    Returns:
        One sentence; None where the import fails for another reason than a package that is not installed.
    """
    cause: BaseException | None = error
    while cause is not None:  # pandas reports that NumPy is missing by an error of its own, without the name
        name = (cause.name or "") if isinstance(cause, ModuleNotFoundError) else ""
        package = name.partition(".")[0]
        if package in EXTRAS:
            return f"{package} is not installed here: {install_command(EXTRAS[package])}"
        if name == "ringtap.analysis":  # as in the traffic generator's single file
            return "this copy of ringtap has no analysis: run the command where all of ringtap is installed"
        cause = cause.__cause__ or cause.__context__
    return None


def install_command(extra: str = "") -> str:
    """Return the command that installs ringtap with an extra where it runs now.

    It names the source that pip recorded (``direct_url.json``), else the checkout that this file belongs to. If neither
    exists any more, it names the packages of the extra one by one.
    """
    import importlib.metadata  # takes 20 ms, which an agent that lacks nothing need not spend

    try:
        distribution = importlib.metadata.distribution("ringtap")
        source = _recorded(distribution.read_text("direct_url.json"), extra)
        requirements = distribution.requires or []
    except importlib.metadata.PackageNotFoundError:
        source, requirements = None, []
    checkout = Path(__file__).resolve().parents[2]
    if source is None and (checkout / "pyproject.toml").is_file():
        source = [_with(str(checkout), extra)]
    return f"{pip()} install {shlex.join(source or _packages(requirements, extra))}"


def lacking(what: str, packages: Iterable[str]) -> str:
    """Return a sentence if packages that something needs are not installed; empty if all of them are.

    Args:
        what: what needs them.
        packages: names to import, all of one extra.
    """
    missing = [name for name in packages if not _is_installed(name)]
    if not missing:
        return ""
    extra = EXTRAS[missing[0].partition(".")[0]]
    return f"{what} needs {' and '.join(missing)}, not installed here: {install_command(extra)}"


def _is_installed(name: str) -> bool:
    parts = name.split(".")  # a name within a package that is not installed cannot be looked for
    return all(find_spec(".".join(parts[: count + 1])) is not None for count in range(len(parts)))


def require(what: str, packages: Iterable[str]) -> None:
    """Check that packages that something needs are installed, as `lacking` does.

    Raises:
        UsageError: one is missing.
    """
    if problem := lacking(what, packages):
        raise UsageError(problem)


def cache_folder() -> Path:
    """Return the folder for files that can be recreated: ``$XDG_CACHE_HOME/ringtap``, else ``~/.cache/ringtap``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ringtap"


def state_folder() -> Path:
    """Return the folder for what outlives a program: ``$XDG_STATE_HOME/ringtap``, else ``~/.local/state/ringtap``."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ringtap"


def shipped_example(path: str | os.PathLike[str]) -> Path | None:
    """Return the example that ships with ringtap under the name ``examples/NAME``, unless that file exists here."""
    shipped = Path(__file__).parents[1] / path
    if Path(path).parent != Path("examples") or shipped not in shipped.parent.iterdir():
        return None
    return shipped if shipped.is_file() and not Path(path).exists() else None


def with_shipped_examples(command: Iterable[str], say: Callable[[str], object]) -> list[str]:
    """Return a command in which each `shipped_example` is its file, and say which file that is."""
    found = []
    for word in command:
        if shipped := shipped_example(word):
            say(f"{word} is {shipped}, which ships with ringtap: there is no such file here")
        found.append(str(shipped or word))
    return found


def pip() -> str:
    """Return the shortest command that runs this interpreter's pip."""
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable or 'python3')} -m pip"


def _with(source: str, extra: str) -> str:
    return f"{source}[{extra}]" if extra else source


def _recorded(record: str | None, extra: str) -> list[str] | None:
    """Return pip's arguments for the source in a direct_url.json (packaging.python.org, "Direct URL"); None if gone."""
    if record is None:
        return None
    recorded = json.loads(record)
    url = str(recorded["url"])
    if "vcs_info" in recorded:
        commit = recorded["vcs_info"]["commit_id"]
        return [f"{_with('ringtap', extra)} @ {recorded['vcs_info']['vcs']}+{url}@{commit}"]
    if urlsplit(url).scheme != "file":
        return [f"{_with('ringtap', extra)} @ {url}"]
    path = Path(unquote(urlsplit(url).path))
    if not path.exists():
        return None
    editable = recorded.get("dir_info", {}).get("editable", False)
    return [*(["--editable"] if editable else []), _with(str(path), extra)]


def _packages(requirements: list[str], extra: str) -> list[str]:
    """Return the packages of an extra, including those of the extras that it includes."""
    found: list[str] = []
    for line in requirements:
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        of = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        if (of[1] if of else "") != extra:
            continue
        own = re.fullmatch(r"ringtap\[([\w,-]+)\]", requirement)
        found += (
            [each for name in own[1].split(",") for each in _packages(requirements, name)] if own else [requirement]
        )
    return found or [name for name, of_extra in EXTRAS.items() if of_extra == extra]
