"""Parses and formats rates, loads, sizes and durations.

Rates are bits per second (``250mbit``, ``25gbit``), sizes bytes (``1MB`` is 10^6, ``1MiB`` 2^20), durations
seconds (``370ms``). A load is a rate, or a share of a link's capacity (``0.8``, ``80%``). Decimal prefixes throughout,
as the thesis reports them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import NamedTuple

from ringtap.core.errors import UsageError

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*([A-Za-zµμ/]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*", re.ASCII)
_PREFIXED, _POWERS = re.compile(r"([0-9._,]+)([kMG])"), {"k": 3, "M": 6, "G": 9}
_RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_RATE_UNITS = (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))
_SIZE_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_DURATION_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def _parse(text: str, units: dict[str, int] | dict[str, float], what: str, example: str) -> float:
    match, of_unit = _NUMBER.fullmatch(text), {name.lower(): size for name, size in units.items()}
    unit = match.group(3).lower() if match else ""
    if match is None or unit not in of_unit:
        near = _nearest(unit, of_unit)
        hint = f"did you mean {match.group(1)}{near}? " if match and near else ""
        known = ", ".join(name for name in units if name.isascii())
        wrong = "is not understood" if match is None or unit else "has no unit"
        raise UsageError(f"{what} {text!r} {wrong}: {hint}write a number and a unit ({known}), such as {example}")
    value = float(match.group(1) + (match.group(2) or "")) * of_unit[unit]
    if not math.isfinite(value):
        raise UsageError(f"{what} {text!r} is too large")
    return value


def _nearest(unit: str, units: Iterable[str]) -> str:
    """Return the unit that was meant (``sec`` is s, ``gb`` as a rate gbit); empty if that is not clear."""
    begins = [known for known in units if unit.startswith(known)]
    near = difflib.get_close_matches(unit, units, 1) or sorted(begins, key=len)[-1:]
    near = near or [known for known in units if unit and known.startswith(unit)]
    return near[0] if len(near) == 1 else ""


def parse_rate_bps(text: str, name: str = "rate") -> int:
    """Parse a rate such as ``250mbit``, ``25gbit`` or ``25gbit/s`` into bits per second.

    Raises:
        UsageError: the text is not a number with a rate unit; the message begins with the name.
    """
    return round(_parse(text.lower().replace("bit/s", "bit").replace("bps", "bit"), _RATES, name, "250mbit"))


def parse_size_bytes(text: str, name: str = "size") -> int:
    """Parse a size such as ``400kB`` (decimal) or ``1MiB`` (binary) into bytes.

    Raises:
        UsageError: the text is not a number with a size unit; the message begins with the name.
    """
    return round(_parse(text, _SIZES, name, "400kB"))


def parse_duration_s(text: str, name: str = "duration") -> float:
    """Parse a duration such as ``370ms``, ``15s`` or ``3min`` into seconds.

    Raises:
        UsageError: the text is not a number with a time unit; the message begins with the name.
    """
    return _parse(text, _DURATIONS, name, "370ms")


class Load(NamedTuple):
    """Cross traffic, as a share of the capacity of a link and in bit/s."""

    share: float
    bps: float


def is_share(text: str) -> bool:
    """Return True if a load is a share or per cent of the capacity, and no rate."""
    return (match := _SHARE.fullmatch(text)) is not None and (match[2] == "%" or float(match[1]) <= 1)


def parse_load(text: str, capacity_bps: float, name: str = "load") -> Load:
    """Parse a load: a rate (``10gbit``), or a share (``0.8``) or per cent (``80%``) of the capacity.

    Raises:
        UsageError: the text is none of these; the message begins with the name.
    """
    if is_share(text):
        share = float(Decimal(text.strip(" %")) / (100 if "%" in text else 1))
        return Load(share, share * capacity_bps)
    try:
        bps = parse_rate_bps(text, name)
    except UsageError as error:
        raise UsageError(f"{error}, or a share of the capacity, such as 0.8 or 80%") from error
    return Load(bps / capacity_bps, bps)


def load_gbps(load: float | str, capacity_gbps: float, name: str = "load") -> float:
    """Return a load in Gbit/s, given as a number of Gbit/s or as the text of `parse_load`.

    Raises:
        UsageError: it is not a positive load.
    """
    return rate_gbps(parse_load(load, capacity_gbps * 1e9, name).bps / 1e9 if isinstance(load, str) else load, name)


def rate_gbps(rate: float | str, name: str = "rate") -> float:
    """Return a rate in Gbit/s, given as a number of Gbit/s or as text with its unit such as ``25gbit``.

    Raises:
        UsageError: it is not a positive rate; the message names it.
    """
    gbps = parse_rate_bps(rate, name) / 1e9 if isinstance(rate, str) else _number(rate, f"{name} in Gbit/s")
    if not (math.isfinite(gbps) and gbps > 0):
        raise UsageError(f"{name} {rate if isinstance(rate, str) else f'{rate:g} Gbit/s'} is not a positive rate")
    return gbps


def duration_s(duration: float | str, name: str = "a duration") -> float:
    """Return a duration in seconds, given as a number of seconds or as text with its unit such as ``370ms``.

    Raises:
        UsageError: it is not a positive time; the message names it.
    """
    seconds = parse_duration_s(duration, name) if isinstance(duration, str) else _number(duration, f"{name} in seconds")
    if not (math.isfinite(seconds) and seconds > 0):
        shown = duration if isinstance(duration, str) else f"{duration:g} s"
        raise UsageError(f"{name} of {shown} is not a positive time")
    return seconds


def number_or_text(value: float | str, parse: Callable[[str, str], int], name: str) -> int:
    """Return a rate in bit/s or a size in bytes, given as a number of them or as text with its unit.

    Raises:
        UsageError: it is neither a finite number nor such a text; the message names it.
    """
    if isinstance(value, str):
        return parse(value, name)
    number = _number(value, name)
    if not math.isfinite(number):
        raise UsageError(f"{name} {value!r} is not a finite number")
    return round(number)


def _number(value: object, what: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"{what} must be a number or text with a unit, not {value!r}") from None


def _scaled(value: float, units: tuple[tuple[str, float], ...], digits: int) -> str | None:
    """Write a number in the largest of these units that leaves 1 or more before the point, as rounded."""
    for unit, size in units:
        if abs(value) >= size * (1 - 0.5 * 10**-digits):
            return f"{value / size:.{digits}g} {unit}"
    return None


def format_rate(bps: float) -> str:
    """Write bits per second with the prefix that leaves 1 to 999 before the point."""
    return _scaled(bps, _RATE_UNITS, 4) or f"{bps:.4g} bit/s"


def format_size(size_bytes: float) -> str:
    """Write bytes with a decimal prefix."""
    return _scaled(size_bytes, _SIZE_UNITS, 4) or f"{size_bytes:.0f} B"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun in the form that it asks for: ``1 flow``, ``2,000 flows``."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def listed(names: Iterable[str]) -> str:
    """Return names in a sentence: ``a``, ``a and b`` or ``a, b and c``."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def format_duration(seconds: float) -> str:
    """Write seconds as ``8 min 05 s``, ``12.3 s``, ``4.1 ms`` or ``2.5 µs``."""
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    if seconds == 0:
        return "0 s"
    return _scaled(seconds, _DURATION_UNITS, 3) or f"{seconds / 1e-9:.3g} ns"


def format_change(seconds: float) -> str:
    """Write a difference in seconds with its sign: ``+1 h 00 min``, ``-3 s``."""
    size = abs(seconds)
    return f"{'-' if seconds < 0 else '+'}{format_duration(size if size < 60 else round(size))}"


def count_of(text: str, option: str) -> int:
    """Parse a count such as ``138M`` or ``138,357,444``; the prefixes k, M and G are decimal.

    Raises:
        UsageError: as in `whole_number`.
    """
    match = _PREFIXED.fullmatch(text)
    return whole_number(text if match is None else f"{match[1]}e{_POWERS[match[2]]}", option)


def whole_number(text: str, option: str, least: int | None = None, most: int | None = None) -> int:
    """Parse the whole number of an option; ``_`` and ``,`` may group its digits.

    Raises:
        UsageError: it is not a whole number below 10^18, or outside the bounds; the message names the option.
    """
    try:
        number = Decimal(text.replace("_", "").replace(",", ""))
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or abs(number) >= 10**18 or number != int(number):
        raise UsageError(f"{option} {text!r} is not a whole number below 10^18")
    found = int(number)
    if most is not None and not (least or 0) <= found <= most:
        raise UsageError(f"{option} {found} is outside {least} to {most:,}")
    if least is not None and found < least:
        raise UsageError(f"{option} {found} is below {least}")
    return found
