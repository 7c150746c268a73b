"""Describes a kind of traffic: its options of ``ringtap traffic plan``, and a function to make its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from os import PathLike
from typing import TYPE_CHECKING, Any

from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.ethernet import ETHERNET_MTU
from ringtap.core.units import format_rate, is_share, parse_duration_s, parse_load, parse_rate_bps, parse_size_bytes
from ringtap.trafficgen.plans.common import OfferedLoad, PlanOutline

if TYPE_CHECKING:
    from ringtap.core.flow_plan_file import FlowSource


def duration_ns(text: str, name: str = "duration") -> int:
    """Parse a time into nanoseconds.

    Raises:
        UsageError: the text is not a time; the message begins with the name.
    """
    return round(parse_duration_s(text, name) * 1e9)


def _rate_or_share(text: str, name: str) -> int | str:
    """Parse a load into bit/s; a share of a capacity, which is not known here, stays text."""
    return text if is_share(text) else round(parse_load(text, 1.0, name).bps)


# how a number is read where a text needs a unit; for messages, these functions take the name of what has the text
_FROM_NUMBER: dict[Callable[..., Any], Callable[[Any], Any]] = {
    parse_rate_bps: round,
    _rate_or_share: round,
    parse_size_bytes: round,
    duration_ns: lambda seconds: round(seconds * 1e9),
}


@dataclass(frozen=True)
class Option:
    """An option that defines a plan.

    Attributes:
        name: its name without leading dashes, for example ``load-counts``.
        metavar: placeholder of its value in ``--help``.
        help: one line for ``--help``.
        read: function that parses the value; one of a quantity takes the name of the option, too.
        choices: the valid values, if they are few; ``--help`` shows them instead of ``metavar``.
        is_repeated: True if it may be given several times; its value is a list.
    """

    name: str
    metavar: str
    help: str
    read: Callable[..., Any] = str
    choices: tuple[str, ...] = ()
    is_repeated: bool = False

    @property
    def key(self) -> str:
        """Its name among the options passed to ``make``."""
        return self.name.replace("-", "_")

    def convert(self, value: object) -> Any:
        """Return one value in the unit of the options passed to ``make``.

        Args:
            value: text as on the command line, or a number: of bit/s, bytes or seconds for a quantity.

        Raises:
            UsageError: the value is not usable.
        """
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number and not isinstance(value, (str, PathLike)):
            raise UsageError(f"--{self.name} {value!r} is not usable: give {'a number or ' * (not self.choices)}text")
        try:
            found = _FROM_NUMBER.get(self.read, self._from_text)(value) if is_number else self._from_text(value)
        except UsageError as error:
            if self.read in _FROM_NUMBER:
                raise
            raise UsageError(f"--{self.name}: {error}") from error
        except (ValueError, OverflowError) as error:
            raise UsageError(f"--{self.name} {value!r} is not usable: {self.help}") from error
        if self.choices and found not in self.choices:
            hint = did_you_mean(found, self.choices)
            raise UsageError(f"--{self.name} {value!r} is unknown: {hint}it is one of {', '.join(self.choices)}")
        return found

    def _from_text(self, value: Any) -> Any:
        return self.read(str(value), f"--{self.name}") if self.read in _FROM_NUMBER else self.read(str(value))


@dataclass(frozen=True)
class TrafficKind:
    """A kind of traffic.

    Attributes:
        name: its name for ``--kind``.
        make: function that makes a plan from the given options, by key, and the frame.
        needs: required options.
        takes: optional ones.
        finds_receivers: True if its input may name the receivers, so that ``--to`` is optional.
    """

    name: str
    make: Callable[[dict[str, Any], PlanOutline], FlowSource]
    needs: tuple[Option, ...] = ()
    takes: tuple[Option, ...] = ()
    finds_receivers: bool = False

    @property
    def options(self) -> dict[str, Option]:
        """Every option that it takes, by key."""
        return {option.key: option for option in (*self.needs, *self.takes, SEED, *TRANSPORT)}

    def check(self, given: Iterable[str]) -> None:
        """Check that no option that it needs is missing, and that it takes every other one.

        Args:
            given: the keys of the options that are given.

        Raises:
            UsageError: an option is missing, or does not belong to the kind.
        """
        given, known = sorted(given), self.options
        for key in given:
            if key not in known:
                hint = did_you_mean(key, known)
                wrong = f"--kind {self.name} does not take --{key.replace('_', '-')}"
                raise UsageError(f"{wrong}: {hint.strip()}" if hint else wrong)
        for option in self.needs:
            if option.key not in given:
                raise UsageError(f"--kind {self.name} needs --{option.name}")


# Options of several kinds; those of a single kind are in its module
LOAD = Option("load", "LOAD", "mean over the plan: a rate such as 10gbit, or a share of --capacity", _rate_or_share)
CAPACITY = Option("capacity", "RATE", "capacity of the link, of which --load is a share", parse_rate_bps)
LOAD_COUNTS = Option("load-counts", "", "what --load counts (default payload)", choices=("payload", "wire"))
MTU = Option("mtu", "BYTES", f"largest IP packet, for --load-counts wire (default {ETHERNET_MTU})", int)
RATE = (LOAD, CAPACITY, LOAD_COUNTS, MTU)
DURATION = Option("duration", "TIME", "length of the plan, for example 60s", duration_ns)
TO = Option("to", "HOST:PORT", "a receiver; may be repeated", is_repeated=True)
FROM = Option(
    "from",
    "ADDRESS",
    "address to send from; may be repeated (default: unbound); workload: its directory",
    is_repeated=True,
)
NODE = Option("node", "ADDRESS:PORT", "all-to-all, ring, list, workload: sends from it and receives", is_repeated=True)
ITERATIONS = Option("iterations", "N", "ring, workload: how many", int)
SCALE = Option("scale", "S", "divide flow sizes by this (default 1)", float)
# Options of every kind
SEED = Option("seed", "SEED", "seed of everything random (default 1)", int)
TRANSPORT = {
    Option("congestion-control", "NAME", "for the sender: for example cubic"): "congestion_control",
    Option("dscp", "N", "for the sender: 0 to 63", int): "dscp",
    Option("send-buffer", "SIZE", "for the sender: socket buffer", parse_size_bytes): "send_buffer_bytes",
    Option("pacing", "RATE", "for the sender: payload rate that each flow is held to", parse_rate_bps): "pacing_bps",
}
# Options that --help lists first
SHARED = (*RATE, DURATION, TO, FROM, NODE, SEED)


def offered_load(given: dict[str, Any]) -> OfferedLoad | None:
    """Return the load that ``--load``, ``--capacity``, ``--load-counts`` and ``--mtu`` request; None without them.

    Raises:
        UsageError: an option is given without the one that it qualifies, or a share without a capacity.
    """
    if "load" not in given:
        if "load_counts" in given or "mtu" in given or "capacity" in given:
            raise UsageError("--capacity, --load-counts and --mtu say what --load means: give --load too")
        return None
    load, is_of_capacity = given["load"], isinstance(given["load"], str)
    if is_of_capacity != ("capacity" in given):
        lack = "is a share: add the --capacity of the link" if is_of_capacity else "is a rate: leave --capacity out"
        raise UsageError(f"--load {load if is_of_capacity else format_rate(load)} {lack}")
    if is_of_capacity:
        load = parse_load(load, given["capacity"], "--load").bps
    if "mtu" in given and given.get("load_counts") != "wire":
        raise UsageError("--mtu goes with --load-counts wire: payload does not depend on it")
    return OfferedLoad(load, given.get("load_counts", "payload"), given.get("mtu", ETHERNET_MTU))


def needed_load(given: dict[str, Any]) -> OfferedLoad:
    """Return the load, for a kind that needs ``--load``."""
    load = offered_load(given)
    assert load is not None
    return load
