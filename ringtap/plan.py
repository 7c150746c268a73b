"""The sweep plan: TOML in, a checked and resolved plan out (docs/plan.md)."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ringtap.errors import UsageError
from ringtap.models import PROFILES
from ringtap.units import parse_duration_s, parse_rate_bps, parse_size_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TRAFFIC_KINDS = ("iperf", "consistent", "burst")
FRAMEWORKS = ("ddp", "horovod")


@dataclass(frozen=True)
class Model:
    """One training job of a sweep; sizes are full-size, divided by the plan's scale when run.

    Attributes:
        name: as used in series names.
        title: as used in reports.
        parameters: parameter count.
        layers: layers the gradient is cut into.
        compute_s: compute time of an iteration.
        bucket_bytes: DDP's bucket size, Horovod's fusion threshold.
        thesis_iteration_s: mean iteration time without cross traffic in Table 3.1, if it is one of its models.
        command: the user's own job instead of the scale model; run on every worker with torchrun's environment
            variables.
        framework: what synchronises the gradients: ``ddp``, or ``horovod``, whose variables the job gets too.
    """

    name: str
    title: str
    parameters: int
    layers: int
    compute_s: float
    bucket_bytes: int
    thesis_iteration_s: float | None
    command: tuple[str, ...] = ()
    framework: str = "ddp"


@dataclass(frozen=True)
class Testbed:
    """The testbed a sweep builds; rates are those of the links as built (scaled)."""

    configuration: str
    hosts: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    cross_from: str = ""
    cross_to: str = ""
    queue_bytes: int = 400_000
    burst_bytes: int = 65_536
    mtu: int = 1500
    congestion_control: str = "cubic"
    offload_segments: int = 4


@dataclass(frozen=True)
class Window:
    """When a point counts as measured.

    Attributes:
        warmup_iterations: iterations of a new job that are left out.
        settle_s: seconds after each load step that are left out.
        min_s: least length of the window.
        min_iterations: least number of iterations in it.
        max_s: length at which it ends even with fewer iterations.
        retries: how often a window is measured again when the machine was too busy to keep time in it.
        start_timeout_s: seconds a job may take to its first iteration.
    """

    warmup_iterations: int = 5
    settle_s: float = 3.0
    min_s: float = 10.0
    min_iterations: int = 20
    max_s: float = 30.0
    retries: int = 2
    start_timeout_s: float = 120.0


@dataclass(frozen=True)
class Burst:
    """Shape of burst traffic (Algorithm 2).

    Attributes:
        height: rate in a burst as a multiple of the load.
        length_s: length of a burst.
        period_s: time from one burst to the next.
    """

    height: float = 3.0
    length_s: float = 0.001
    period_s: float = 0.01


@dataclass(frozen=True)
class SweepPlan:
    """A sweep: models x traffic kinds x loads, on a testbed.

    Attributes:
        name: slug of the sweep.
        seed: of everything random.
        scale: how many times smaller than full size the testbed is.
        capacity_bps: rate of the links as built.
        loads: cross traffic asked for, as shares of the capacity; 0 is the point without it. Repeats are replicates.
        random_order: whether each series takes its loads in random order.
        models: the training jobs.
        traffic: kinds of cross traffic.
        iperf_streams: parallel streams of the iperf kind.
        burst: shape of the burst kind.
        testbed: the testbed.
        window: when a point counts as measured.
    """

    name: str
    seed: int
    scale: float
    capacity_bps: int
    loads: tuple[float, ...]
    random_order: bool
    models: tuple[Model, ...]
    traffic: tuple[str, ...]
    iperf_streams: int
    testbed: Testbed
    window: Window = field(default_factory=Window)
    burst: Burst = field(default_factory=Burst)

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the names docs/run-directory.md gives."""
        item = asdict(self)
        item["topology"] = item.pop("testbed")
        return item


class _Table:
    """One table of the plan file, taken apart key by key; knows the line of each key for its errors."""

    def __init__(self, path: Path, name: str, items: dict[str, Any], first_line: int, lines: list[str]) -> None:
        self._path, self._name, self._items, self._first_line, self._lines = path, name, items, first_line, lines
        self._known: list[str] = []

    def _line(self, key: str) -> int:
        for number in range(self._first_line, len(self._lines) + 1):
            if re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", self._lines[number - 1]):
                return number
        return self._first_line

    def fail(self, key: str, reason: str) -> NoReturn:
        """Refuse a key's value."""
        raise UsageError(f"{self._path} line {self._line(key)}: {self._name}.{key} {reason}")

    def take(
        self, key: str, kind: type | tuple[type, ...], default: Any, check: Callable[[Any], bool], rule: str
    ) -> Any:
        """Value of a key, of a type and within a rule; ``...`` as default means the key must be there."""
        self._known.append(key)
        if key not in self._items:
            if default is ...:
                self.fail(key, "is missing")
            return default
        value = self._items[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not check(value):
            self.fail(key, f"= {value!r} is not {rule}")
        return value

    def number(self, key: str, default: Any, least: float, most: float) -> float:
        """A number within bounds."""
        rule = f"a number from {least:g} to {most:g}"
        return float(self.take(key, (int, float), default, lambda value: least <= value <= most, rule))

    def integer(self, key: str, default: Any, least: int, most: int) -> int:
        """An integer within bounds."""
        rule = f"a whole number from {least} to {most}"
        return int(self.take(key, int, default, lambda value: least <= value <= most, rule))

    def text(self, key: str, default: Any, choices: tuple[str, ...] = ()) -> str:
        """A string, one of the choices where there are any; for a wrong one the nearest is named."""
        rule = f"one of {', '.join(choices)}" if choices else "a text"
        near = difflib.get_close_matches(str(self._items.get(key, "")).lower(), choices, 1)
        rule += f"; did you mean {near[0]}?" if near else ""
        return str(self.take(key, str, default, lambda value: not choices or value in choices, rule))

    def texts(self, key: str, default: Any) -> tuple[str, ...]:
        """A list of strings."""
        rule = "a list of texts"
        return tuple(self.take(key, list, default, lambda value: all(isinstance(one, str) for one in value), rule))

    def quantity(self, key: str, default: str, parse: Callable[[str], float]) -> float:
        """A rate, size or duration with its unit."""
        text = self.text(key, default)
        try:
            return parse(text)
        except UsageError as error:
            self.fail(key, f"= {text!r} is not understood: {error}")

    def finish(self) -> None:
        """Refuse keys nobody asked for, naming the nearest right one."""
        for key in self._items:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
                self.fail(key, f"is not a key of this table; {hint}")


def load_plan(path: Path) -> SweepPlan:
    """Read and check a plan file.

    Raises:
        UsageError: unreadable, not TOML, a wrong key or value (with its line and the nearest right key).
    """
    try:
        text = path.read_text()
        root = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    lines = text.splitlines() or [""]
    tables = {"sweep": dict, "testbed": dict, "window": dict, "burst": dict, "models": list}
    top = _Table(path, "plan", root, 1, lines)
    for name, kind in tables.items():
        top.take(name, kind, ... if name in ("sweep", "models") else {}, lambda _: True, "a table")
    for key in root:
        if key not in tables:
            near = difflib.get_close_matches(key, tables, 1)
            line = next((n for n, one in enumerate(lines, 1) if re.match(rf"\s*\[*\s*{re.escape(key)}\b", one)), 1)
            hint = f"did you mean [{near[0]}]?" if near else f"known: {', '.join(tables)}"
            raise UsageError(f"{path} line {line}: [{key}] is not a table of a plan; {hint}")

    def table(name: str, items: dict[str, Any], count: int = 0) -> _Table:
        heads = [n for n, one in enumerate(lines, 1) if re.match(rf"\s*\[+\s*{name}\s*\]", one)]
        return _Table(path, name, items, heads[count] if count < len(heads) else 1, lines)

    sweep = table("sweep", root["sweep"])
    scale = sweep.number("scale", 100.0, 1, 100_000)
    models = [
        _model(table("models", item, count)) for count, item in enumerate(root["models"]) if isinstance(item, dict)
    ]
    if not models or len(models) != len(root["models"]):
        raise UsageError(f"{path}: models must be tables: write [[models]] before each")
    if len({model.name for model in models}) != len(models):
        raise UsageError(f"{path}: two models have the same name")
    return _sweep(
        sweep,
        scale,
        tuple(models),
        _testbed(table("testbed", root.get("testbed", {}))),
        _window(table("window", root.get("window", {}))),
        _burst(table("burst", root.get("burst", {}))),
    )


def _sweep(
    sweep: _Table, scale: float, models: tuple[Model, ...], testbed: Testbed, window: Window, burst: Burst
) -> SweepPlan:
    loads = sweep.take(
        "loads",
        list,
        ...,
        lambda value: bool(value) and all(_is_number(one) for one in value),
        "a list of shares of the capacity",
    )
    for load in loads:
        if not 0 <= load < 1:
            sweep.fail("loads", f"holds {load}: a load is a share of the capacity, from 0 to below 1")
    traffic = sweep.texts("traffic", ["iperf", "consistent"])
    for kind in traffic:
        if kind not in TRAFFIC_KINDS:
            near = difflib.get_close_matches(kind, TRAFFIC_KINDS, 1)
            sweep.fail(
                "traffic",
                f"holds {kind!r}; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(TRAFFIC_KINDS)}"),
            )
    plan = SweepPlan(
        name=sweep.text("name", "sweep"),
        seed=sweep.integer("seed", 1, 0, 2**31),
        scale=scale,
        capacity_bps=round(sweep.quantity("capacity", "25gbit", parse_rate_bps) / scale),
        loads=tuple(float(load) for load in loads),
        random_order=sweep.text("order", "as-written", ("as-written", "random")) == "random",
        models=models,
        traffic=traffic,
        iperf_streams=sweep.integer("iperf_streams", 2, 1, 64),
        testbed=testbed,
        window=window,
        burst=burst,
    )
    sweep.finish()
    return plan


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _model(table: _Table) -> Model:
    name = table.text("name", ...)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}", name):
        table.fail("name", f"= {name!r} is not a plain name (letters, digits, dot, dash)")
    profile = PROFILES.get(name)
    command = table.texts("command", [])
    if profile is None and not command and "compute" not in table._items:
        near = difflib.get_close_matches(name, PROFILES, 1)
        hint = f"did you mean {near[0]}?" if near else f"profiles: {', '.join(PROFILES)}"
        table.fail("name", f"= {name!r} is no profile; {hint} Or give parameters and compute, or a command")
    own: Any = ... if profile is None else None
    compute = f"{profile.compute_s}s" if profile else ("1s" if command else ...)
    model = Model(
        name=name,
        title=table.text("title", profile.title if profile else name),
        parameters=table.integer("parameters", profile.parameters if profile else own, 1, 10**13),
        layers=table.integer("layers", profile.layers if profile else 16, 1, 10_000),
        compute_s=table.quantity("compute", compute, parse_duration_s),  # type: ignore[arg-type]
        bucket_bytes=int(table.quantity("bucket", "25MiB", parse_size_bytes)),
        thesis_iteration_s=profile.thesis_iteration_s if profile else None,
        command=command,
        framework=table.text("framework", "ddp", FRAMEWORKS),
    )
    table.finish()
    return model


def _testbed(table: _Table) -> Testbed:
    testbed = Testbed(
        configuration=table.text("configuration", "B", ("A", "B", "custom")),
        hosts=table.texts("hosts", []),
        workers=table.texts("workers", []),
        cross_from=table.text("cross_from", ""),
        cross_to=table.text("cross_to", ""),
        queue_bytes=int(table.quantity("queue", "400kB", parse_size_bytes)),
        burst_bytes=int(table.quantity("burst", "64KiB", parse_size_bytes)),
        mtu=table.integer("mtu", 1500, 576, 9000),
        congestion_control=table.text("congestion_control", "cubic"),
        offload_segments=table.integer("offload_segments", 4, 1, 44),
    )
    table.finish()
    roles = (testbed.hosts, testbed.workers, testbed.cross_from, testbed.cross_to)
    if testbed.configuration != "custom":
        if any(roles):
            table.fail(
                "configuration",
                f'= {testbed.configuration!r} brings its own hosts and roles; use "custom" to name them',
            )
        return testbed
    if not all(roles):
        table.fail("configuration", '= "custom" needs hosts, workers, cross_from and cross_to')
    for key, names in (
        ("workers", testbed.workers),
        ("cross_from", (testbed.cross_from,)),
        ("cross_to", (testbed.cross_to,)),
    ):
        for name in names:
            if name not in testbed.hosts:
                table.fail(key, f"names {name!r}, which is not among the hosts {', '.join(testbed.hosts)}")
    if testbed.cross_from == testbed.cross_to:
        table.fail("cross_to", "is the sender of the cross traffic itself")
    return testbed


def _window(table: _Table) -> Window:
    window = Window(
        warmup_iterations=table.integer("warmup_iterations", 5, 0, 10_000),
        settle_s=table.quantity("settle", "3s", parse_duration_s),
        min_s=table.quantity("min_time", "10s", parse_duration_s),
        min_iterations=table.integer("min_iterations", 20, 2, 1_000_000),
        max_s=table.quantity("max_time", "30s", parse_duration_s),
        retries=table.integer("retries", 2, 0, 100),
        start_timeout_s=table.quantity("start_timeout", "120s", parse_duration_s),
    )
    table.finish()
    if window.max_s < window.min_s:
        table.fail("max_time", f"= {window.max_s:g} s is below min_time = {window.min_s:g} s")
    return window


def _burst(table: _Table) -> Burst:
    burst = Burst(
        height=table.number("height", 3.0, 1.0, 1000.0),
        length_s=table.quantity("length", "1ms", parse_duration_s),
        period_s=table.quantity("period", "10ms", parse_duration_s),
    )
    table.finish()
    if not 0 < burst.height * burst.length_s < burst.period_s:
        table.fail(
            "length",
            f"= {burst.length_s:g} s at {burst.height:g} times the load carries no less than the whole period of "
            f"{burst.period_s:g} s",
        )
    return burst
