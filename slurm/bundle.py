"""Implements ``ringtap bundle``: gathers in a folder all that a cluster without internet needs to run ringtap."""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringtap
from ringtap.core.command_options import add_json
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.installation import install_command
from ringtap.core.isolated_python import python_command
from ringtap.core.parent_death import run_helper
from ringtap.core.units import format_size
from ringtap.slurm.site_profiles import Site, load_site
from ringtap.trafficgen.commands.zipapp import write_archive

ARCHIVE = "ringtap-traffic.pyz"
MANIFEST = "MANIFEST"
README = "README"
# platform tags of wheels that run on glibc 2.28 and newer
_PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux2010", "manylinux1")
_OLDEST_MINOR = 10  # Python 3.10
_PIP_TIMEOUT_S = 600.0
_OLDER_PYTHON = re.compile(r"python_version\s*<\s*['\"]3\.(\d+)['\"]")


@dataclass(frozen=True)
class Bundle:
    """Bundle that has been written.

    Attributes:
        folder: folder of the bundle.
        files: SHA-256 of each file in it, by name.
        from_site: packages that the site's own wheels provide.
    """

    folder: Path
    files: dict[str, str]
    from_site: tuple[str, ...]


def write_bundle(python: str, site: Site, folder: Path) -> Bundle:
    """Gather the wheels that a site lacks, ringtap's own, and the traffic generator.

    Args:
        python: the site's version of Python, such as ``3.11``.
        site: the site; what its wheelhouse has is left out.
        folder: a new or empty folder.

    Raises:
        UsageError: the version is not supported, the folder is in use or not writable, or ringtap is not installed.
        MeasurementError: pip cannot download the wheels.
    """
    match = re.fullmatch(r"3\.(\d+)", python)
    if match is None or int(match[1]) < _OLDEST_MINOR:
        raise UsageError(
            f"--python {python!r} is not a version that ringtap runs on: 3.{_OLDEST_MINOR} or newer, as 3.11"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty: name another folder")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
        gathered = Path(temporary)
        own_wheel(gathered)
        _download(requirements(int(match[1])), python, site, gathered)
        from_site = []
        for wheel in sorted(gathered.iterdir()):
            name = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()  # a package's, in its normal form
            if name in site.wheelhouse:
                from_site.append(name)
            else:
                wheel.replace(folder / wheel.name)
    write_archive(folder / ARCHIVE)
    (folder / README).write_text(_readme(python, site, from_site))
    files = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text("".join(f"{digest}  {name}\n" for name, digest in files.items()))
    return Bundle(folder, files, tuple(from_site))


def check_wheels(folder: Path) -> None:
    """Compare the files of a bundle with the hashes in its manifest; wheels that were added have none.

    Raises:
        UsageError: a file is missing, or another one; or no wheel is ringtap's.
    """
    if not any(folder.glob("ringtap-*.whl")):
        raise UsageError(f"--wheels {folder} has no wheel of ringtap: make one with ringtap bundle -o DIR")
    manifest = folder / MANIFEST
    for line in manifest.read_text().splitlines() if manifest.exists() else ():
        digest, _, name = line.partition("  ")
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            raise UsageError(f"--wheels {folder}: {name} is not as {MANIFEST} says: copy the bundle again")


def _readme(python: str, site: Site, from_site: list[str]) -> str:
    rest = f" ({', '.join(from_site)} from the wheels of {site.name})" if from_site else ""
    return f"""\
ringtap {ringtap.__version__} for Python {python} on {site.name}.
Install{rest}: pip install --no-index --find-links DIR ringtap      DIR: this folder
In a job: ringtap submit --site {site.name} --wheels DIR -- COMMAND
The traffic generator alone, with nothing installed: python3 {ARCHIVE} --help
Check the files: sha256sum --check {MANIFEST}
"""


def requirements(minor: int) -> list[str]:
    """Return the requirements of ringtap without its extras, on Python 3.<minor>."""
    found = []
    for line in _distribution().requires or ():
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        older = _OLDER_PYTHON.search(marker)
        if "extra" not in marker and (older is None or minor < int(older[1])):
            found.append(requirement)
    return found


def _distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("ringtap")
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"ringtap is not installed here, so there is nothing to bundle: {install_command()}"
        ) from error


def own_wheel(folder: Path) -> Path:
    """Write a wheel of the ringtap that runs here; return its path.

    It is built from the installed modules, so it also works if the source is gone.
    """
    distribution = _distribution()
    version, tag = distribution.version, "py3-none-any"
    about = f"ringtap-{version}.dist-info"
    path = folder / f"ringtap-{version}-{tag}.whl"
    texts = {name: distribution.read_text(name) for name in ("METADATA", "entry_points.txt", "top_level.txt")}
    texts["METADATA"] = texts["METADATA"] or distribution.read_text("PKG-INFO")  # name of the file in a checkout
    generator = f"Wheel-Version: 1.0\nGenerator: ringtap {version}\nRoot-Is-Purelib: true\nTag: {tag}\n"
    contents = {f"{about}/{name}": text.encode() for name, text in texts.items() if text}
    contents[f"{about}/WHEEL"] = generator.encode()
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (*_modules(), *contents.items()):
            archive.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}\n")
        archive.writestr(f"{about}/RECORD", "".join([*record, f"{about}/RECORD,,\n"]))
    return path


def _modules(folder: Path = Path(ringtap.__file__).parent, name: str = "ringtap") -> Iterator[tuple[str, bytes]]:
    """Yield the package's files with their names in a wheel; in a checkout, the subpackages are links."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if path.name != "__pycache__":
                yield from _modules(path, f"{name}/{path.name}")
        elif not path.name.startswith("."):
            yield f"{name}/{path.name}", path.read_bytes()


def _download(wanted: list[str], python: str, site: Site, folder: Path) -> None:
    """Download wheels for another machine's Python with pip, including their dependencies."""
    platforms = [f"--platform={platform}_{site.architecture}" for platform in _PLATFORMS]
    command = python_command(sys.executable, "pip", "download", "--quiet", "--disable-pip-version-check")
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    try:
        done = run_helper([*command, f"--dest={folder}", *wanted], _PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(
            f"pip did not end within {_PIP_TIMEOUT_S:.0f} s: can it reach a package index?"
        ) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        why = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise MeasurementError(f"pip cannot get {', '.join(wanted)} for Python {python}: {why}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``bundle`` verb."""
    parser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, metavar="X.Y", help=f"version of Python there (default: {here})")
    parser.add_argument("--site", metavar="SITE", help="cluster, or a profile's path (default: as of ringtap submit)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to make")
    add_json(parser)
    parser.set_defaults(handler=_bundle)


def _bundle(options: argparse.Namespace) -> int:
    site = load_site(options.site)
    bundle = write_bundle(options.python, site, options.output)
    if options.json:
        print(json.dumps({"folder": str(bundle.folder), "files": bundle.files, "from_site": bundle.from_site}))
        return 0
    for name in bundle.files:
        print(f"  {name}")
    if bundle.from_site:
        print(f"  from the wheels of {site.name}: {', '.join(bundle.from_site)}")
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"Wrote {options.output} ({format_size(size)}) for {site.name}: Python {options.python}, {site.architecture}")
    print(f"Next: copy it to {site.name}, and there: ringtap submit --wheels DIR -- COMMAND")
    return 0
