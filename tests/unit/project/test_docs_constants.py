"""Numbers of the docs that are constants of the code: an HTML comment behind a number names its constant.

``3 s<!-- ringtap.agents.hosts.message_frames.BEAT_S -->`` is compared with the constant. The default of a dataclass's
field is named in the same way: ``ringtap.core.sweep_plans.sweep_plan.Window.retries``.
"""

import dataclasses
import importlib
import math
import re
from pathlib import Path

import pytest

from ringtap.core.errors import UsageError
from ringtap.core.units import parse_duration_s, parse_rate_bps, parse_size_bytes

pytestmark = [pytest.mark.computes, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MIN_MARKERS = 150
MARKER = re.compile(r"<!--\s*(.*?)\s*-->")  # the docs have no other comments, so that a misspelt one fails
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
QUANTITY = re.compile(
    rf"(?<![\w.,])(?P<number>[0-9][0-9,]*(?:\.[0-9]+)?|{'|'.join(WORDS)}) ?(?P<unit>%|[A-Za-zµ/]*)[`\"*]*$",
    re.IGNORECASE,
)
UNITS = {"second": "s", "seconds": "s", "minute": "min", "minutes": "min", "bytes": "B"}
DURATIONS = {"_S": 1.0, "_MS": 1e-3, "_US": 1e-6, "_NS": 1e-9}


def markers() -> list[tuple[str, str, str]]:
    """The place, the text before the marker in its line, and the constant of every marker."""
    found = []
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for match in MARKER.finditer(line):
                before = MARKER.sub("", line[: match.start()])
                found.append((f"{page.relative_to(ROOT)}:{number}", before, match.group(1)))
    return found


def constant(name: str) -> float:
    """The number that the code has under this name.

    Raises:
        LookupError: there is none.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:length])
        try:
            value: object = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            continue
        for part in parts[length:]:
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                defaults = {field.name: field.default for field in dataclasses.fields(value)}
                value = defaults.get(part)
            else:
                value = getattr(value, part, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        break
    raise LookupError(f"the code has no number {name}")


def written(before: str, name: str) -> float:
    """The number at the end of this text, in the unit that the constant's name ends with.

    Raises:
        ValueError: there is none.
    """
    match = QUANTITY.search(before)
    if match is None:
        raise ValueError("no number stands before the marker")
    number, unit = match.group("number").lower().replace(",", ""), match.group("unit")
    if number in WORDS:
        number = str(WORDS.index(number))
    text = f"{number} {UNITS.get(unit, unit)}"
    suffix = next((suffix for suffix in DURATIONS if name.upper().endswith(suffix)), "")
    try:
        if suffix:
            return parse_duration_s(text) / DURATIONS[suffix]
        if name.upper().endswith("_BYTES"):
            return parse_size_bytes(text)
        if name.upper().endswith(("_BPS", "_GBPS")):
            return parse_rate_bps(text) / (1e9 if name.upper().endswith("_GBPS") else 1)
    except UsageError as error:
        raise ValueError(str(error)) from error
    if unit == "%":
        return float(number) / 100
    if unit and not (unit == "ppm" and name.endswith("_PPM")):
        raise ValueError(f"the unit {unit!r} is none of a constant without one: put the marker behind the number")
    return float(number)


def difference(before: str, name: str) -> str:
    """A sentence about the text that does not have the constant's value; empty if it has."""
    try:
        value = constant(name)
        if math.isclose(written(before, name), value, rel_tol=1e-9):
            return ""
    except (LookupError, ValueError) as error:
        return f"{before[-40:]!r}: {error}"
    return f"{before[-40:]!r}: the code has {name} = {value:,}"


def test_the_docs_have_the_numbers_of_the_code() -> None:
    wrong = [f"{place}: {sentence}" for place, before, name in markers() if (sentence := difference(before, name))]
    assert not wrong, "\n".join(wrong)


def test_the_docs_have_markers() -> None:
    assert len(markers()) >= MIN_MARKERS
    assert len(markers()) == sum(page.read_text().count("<!--") for page in PAGES), "a marker goes over two lines"


def test_no_marker_is_in_a_code_block_where_it_would_be_shown() -> None:
    for page in PAGES:
        for block in FENCED.finditer(page.read_text()):
            assert not MARKER.search(block.group()), f"{page.relative_to(ROOT)}: {block.group()}"


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ("a heartbeat every 3 s", "ringtap.agents.hosts.message_frames.BEAT_S"),
        ("a heartbeat every three seconds", "ringtap.agents.hosts.message_frames.BEAT_S"),
        ("| 256 KiB", "ringtap.agents.hosts.message_frames.CHUNK_BYTES"),
        ("below 88 %", "ringtap.agents.sweep.traffic_precheck.REQUIRED_SHARE"),
        ("bins of 100 ms", "ringtap.core.run_directory_schema.LOAD_BIN_NS"),
        ("up to 262,144", "ringtap.analysis.pcap.scan.MAX_CONVERSATIONS"),
        ('| `"3s"`', "ringtap.core.sweep_plans.sweep_plan.Window.settle_s"),
        ("of 25 Gbit/s", "ringtap.analysis.published_results.CAPACITY_GBPS"),
    ],
)
def test_a_right_number_passes(before: str, name: str) -> None:
    assert difference(before, name) == ""


@pytest.mark.parametrize(
    ("before", "name", "reason"),
    [
        ("every 4 s", "ringtap.agents.hosts.message_frames.BEAT_S", "BEAT_S = 3.0"),
        ("every 13 s", "ringtap.agents.hosts.message_frames.BEAT_S", "BEAT_S = 3.0"),
        ("every 3 ms", "ringtap.agents.hosts.message_frames.BEAT_S", "BEAT_S = 3.0"),
        ("every 3", "ringtap.agents.hosts.message_frames.BEAT_S", "has no unit"),
        ("every 3 kB", "ringtap.agents.hosts.message_frames.BEAT_S", "not understood"),
        ("2 times", "ringtap.core.sweep_plans.sweep_plan.Window.retries", "behind the number"),
        ("a heartbeat", "ringtap.agents.hosts.message_frames.BEAT_S", "no number"),
        (
            "3 s",
            "ringtap.agents.hosts.message_frames.NO_SUCH_S",
            "has no number ringtap.agents.hosts.message_frames.NO_SUCH_S",
        ),
        ("3 s", "ringtap.agents.no_such_module.BEAT_S", "has no number"),
        ("3 s", "ringtap.core.sweep_plans.sweep_plan.Window.no_such_s", "has no number"),
        ("3 s", "ringtap.core.run_directory_schema.NODE_JSON", "has no number"),
        ("3 s", "frames.BEAT_S", "has no number"),
        ("3 s", "BEAT_S", "has no number"),
    ],
)
def test_a_wrong_number_is_found(before: str, name: str, reason: str) -> None:
    assert reason in difference(before, name)


def test_no_page_shows_a_backslash_before_a_bar() -> None:
    """In code within a table, the site shows both."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert [path.name for path in pages if "\\|" in path.read_text()] == []
