import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.core.errors import UsageError
from ringtap.core.units import (
    counted,
    format_change,
    format_duration,
    format_rate,
    format_size,
    parse_duration_s,
    parse_load,
    parse_rate_bps,
    parse_size_bytes,
)

pytestmark = pytest.mark.computes


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("250mbit", 250_000_000),
        ("25gbit", 25_000_000_000),
        ("25Gbit/s", 25_000_000_000),
        ("1.5kbit", 1500),
        ("10Gbps", 10**10),
    ],
)
def test_rates(text: str, bps: int) -> None:
    assert parse_rate_bps(text) == bps


@pytest.mark.parametrize(("text", "size"), [("1MB", 10**6), ("1MiB", 2**20), ("400kB", 400_000), ("12B", 12)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("370ms", 0.37), ("3min", 180), ("1h", 3600), ("2.5us", 2.5e-6), ("1e3 s", 1000)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "12", "fast", "-1mbit", "1 furlong", "nan mbit", "1e400gbit", "1mb it", "--", "1,5mbit"]
)
@pytest.mark.parametrize("parse", [parse_rate_bps, parse_size_bytes, parse_duration_s])
def test_nonsense_is_refused_in_one_sentence(text: str, parse: object) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (
            parse_duration_s,
            "100",
            "--x '100' has no unit: write a number and a unit (ns, us, ms, s, min, h), such as 370ms",
        ),
        (parse_duration_s, "2sec", "--x '2sec' is not understood: did you mean 2s? write a number and a unit (ns, us"),
        (parse_duration_s, "2minutes", "did you mean 2min?"),
        (parse_rate_bps, "10", "--x '10' has no unit: write a number and a unit (bit, kbit, mbit, gbit, tbit)"),
        (parse_rate_bps, "10gb", "did you mean 10gbit?"),
        (parse_size_bytes, "5", "--x '5' has no unit: write a number and a unit (B, kB, MB, GB, TB, KiB"),
    ],
)
def test_what_lacks_its_unit_is_answered_with_the_option_and_the_units(
    parse: Callable[[str, str], float], text: str, says: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, "--x")
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["10gbit", "0.4", ".4", "40%", " 40 % ", "40.0%"])
def test_a_load_is_a_rate_a_share_or_per_cent(text: str) -> None:
    assert parse_load(text, 25e9) == (0.4, 1e10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("18", "--load '18' has no unit: write a number and a unit (bit, kbit, mbit, gbit, tbit), such as"),
        ("fast", "--load 'fast' is not understood: write a number and a unit (bit, kbit, mbit, gbit, tbit)"),
        ("-1%", "or a share of the capacity, such as 0.8 or 80%"),
    ],
)
def test_what_is_no_load_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_load(text, 25e9, "--load")
    assert says in str(caught.value)


@given(st.integers(min_value=1, max_value=10**13))
def test_a_written_rate_reads_back(bps: int) -> None:
    back = parse_rate_bps(format_rate(bps).replace("bit/s", "bit"))
    assert math.isclose(back, bps, rel_tol=1e-3)  # four digits are written


def test_formats() -> None:
    assert format_rate(250e6) == "250 Mbit/s"
    assert format_size(922_380_000) == "922.4 MB"
    assert [format_duration(s) for s in (7322, 485, 12.34, 0.0041, 2.5e-6, 0.0)] == [
        "2 h 02 min",
        "8 min 05 s",
        "12.3 s",
        "4.1 ms",
        "2.5 µs",
        "0 s",
    ]


@pytest.mark.parametrize("write", [format_rate, format_size, format_duration])
@given(power=st.integers(min_value=-9, max_value=14), off=st.floats(min_value=-1e-3, max_value=1e-3))
def test_a_value_just_below_a_unit_is_not_written_with_an_exponent(
    write: Callable[[float], str], power: int, off: float
) -> None:
    assert "e+" not in write(10.0**power * (1 + off))


def test_a_number_and_its_noun_agree():
    assert [counted(number, "flow") for number in (0, 1, 2000)] == ["0 flows", "1 flow", "2,000 flows"]
    assert [counted(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]


def test_changes_have_a_sign() -> None:
    changes = (3600.0, -3599.9996, 86_400.0, -3.0, 0.25, 0.0)
    assert [format_change(s) for s in changes] == [
        "+1 h 00 min",
        "-1 h 00 min",
        "+24 h 00 min",
        "-3 s",
        "+250 ms",
        "+0 s",
    ]
