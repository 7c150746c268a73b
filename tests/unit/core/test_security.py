"""What SECURITY.md and the list of licences say: tests, pinned actions and licences are there."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

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
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE)
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
