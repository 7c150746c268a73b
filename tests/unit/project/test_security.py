"""What SECURITY.md and the list of licences say: tests, pinned actions, hashes and licences are there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = [pytest.mark.computes, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "SECURITY.md").read_text()
LICENCES = (ROOT / "docs" / "project" / "dependencies.md").read_text().partition("## Licences")[2]
COPYLEFT = {"scapy": "GPL-2.0-only", "crc32c": "LGPL-2.1-or-later", "shtab": "MPL-2.0"}
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def packages(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", one)[0] for one in requirements} - {"ringtap"}  # type: ignore[index]


def rows() -> dict[str, str]:
    """Licences by package."""
    found = {}
    for line in LICENCES.splitlines():
        if line.startswith("| ") and not line.startswith("| package"):
            names, licence = line.strip("| ").split(" | ")[:2]
            found.update(dict.fromkeys(names.split(", "), licence.partition(";")[0]))
    return found


def metadata(name: str) -> str:
    about = importlib.metadata.metadata(name)
    kinds = [line for line in about.get_all("Classifier", []) if line.startswith("License")]
    text = " ".join([about.get("License-Expression") or "", (about.get("License") or "")[:200], *kinds])
    return text.replace("Python Software Foundation", "PSF").replace("Mozilla Public License", "MPL")


def test_the_tests_of_each_claim_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 30
    for file, name in named:
        texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {name}(" in text for text in texts), f"{file} has no {name}"
    listens = PAGE.partition("## What listens")[2].partition("\n\nHosts of a sweep")[0]
    claims = [line for line in listens.splitlines() if line.startswith("| ")][1:]
    assert len(claims) == 7
    assert all("::test_" in line for line in claims)


def test_actions_are_named_by_their_commit() -> None:
    uses = [
        line.strip()
        for path in (ROOT / ".github" / "workflows").iterdir()
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert uses
    assert all(re.fullmatch(r"- uses: [\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line) for line in uses)


def test_every_package_has_its_licence_in_the_list() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = packages(PROJECT["dependencies"])
    assert not wanted & COPYLEFT.keys()
    wanted |= packages([one for extra, names in extras.items() if extra != "test" for one in names])
    assert rows().keys() == wanted
    assert {name: licence for name, licence in rows().items() if name in COPYLEFT} == COPYLEFT


# tomli is for Python 3.10, and torchvision lies outside the environment
ELSEWHERE = {"tomli", "torchvision"}


@pytest.mark.parametrize("name", sorted(rows().keys() - ELSEWHERE))
def test_licences_are_those_of_the_metadata(name: str) -> None:
    text, licence = metadata(name), rows()[name]
    for word in re.split(r" OR ", licence):
        assert word.partition("-")[0].lower() in text.lower(), text
    assert bool(re.search("GPL|MPL", text)) == bool(re.search("GPL|MPL", licence)), text


# versions that the environment has from elsewhere: without hashes (constraints-torch.txt), compiled, or its own
UNHASHED = {"torch", "torchvision", "horovod", "ringtap", "pip"}


def test_the_environment_is_what_the_constraints_say() -> None:
    """Each package is there in the version that has hashes, and each that is there has them."""
    lines = (ROOT / "constraints.txt").read_text().replace("\\\n", "").splitlines()
    pinned = {}
    for line in lines:
        if line and not line.lstrip().startswith("#"):
            assert re.search(r" --hash=sha256:[0-9a-f]{64}", line), line
            one = Requirement(line.partition(" --hash")[0])
            if one.marker is None or one.marker.evaluate():
                pinned[canonicalize_name(one.name)] = str(one.specifier).removeprefix("==")
    # the machine's own packages are not of this environment
    here = importlib.metadata.distributions(path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    installed = {canonicalize_name(one.metadata["Name"]): one.version for one in here}
    assert len(pinned) > 150
    assert {name: version for name, version in installed.items() if name not in UNHASHED} == pinned


def test_the_demo_installs_a_fraction_of_the_packages_of_the_tests_in_the_same_versions() -> None:
    demo, tests = (
        {line for line in re.sub(r"\\\n\s*", "", (ROOT / name).read_text()).splitlines() if "==" in line}
        for name in ("constraints-demo.txt", "constraints.txt")
    )
    assert demo <= tests
    assert 30 < len(demo) < len(tests) / 3
    assert not {line for line in demo if line.startswith(("polars", "transformers", "wandb"))}


def test_a_package_of_another_hash_is_not_installed(tmp_path: Path) -> None:
    """The options of scripts/prepare.sh, with wheels of a folder."""
    options = next(
        line.split()[1:]
        for line in (ROOT / "scripts" / "prepare.sh").read_text().splitlines()
        if line.endswith("constraints.txt")
    )
    wheel = tmp_path / "harmless-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("harmless.py", "")
        archive.writestr("harmless-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: harmless\nVersion: 1.0\n")
        archive.writestr(
            "harmless-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("harmless-1.0.dist-info/RECORD", "")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", "there", "--no-index", "--find-links", "."]
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for expected, line in (
        (0, f"harmless==1.0 --hash=sha256:{right}"),
        (1, f"harmless==1.0 --hash=sha256:{'0' * 64}"),
        (1, "harmless==1.0"),
    ):
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        (tmp_path / "constraints.txt").write_text(line)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == expected, done.stderr
        assert (tmp_path / "there" / "harmless.py").exists() == (not expected)
