"""The sampling threads: schedules are kept, slots that pass are counted, one collector's trouble is its own."""

import errno
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.node.recording_settings import RunSettings, parse_settings
from ringtap.agents.node.sampling import Entry, Recorders, Sampler
from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.registry import DEFAULT, ORDER
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory
from tests.unit.agent_processes import wait_for

pytestmark = pytest.mark.alone(2)


class Metronome:
    """A collector that notes when it was asked, and takes its time or fails where told to."""

    name = "metronome"

    def __init__(self, context: Context, work: Callable[[int], None] = lambda _count: None, slow: bool = False) -> None:
        self.every_s, self.slow = context.every_s, slow
        self.times_s: list[float] = []
        self.stopped = 0
        self._work = work

    def check(self) -> Check:
        return Check("ok", "there is a clock")

    def start(self) -> None:
        self.begun_s = time.monotonic()

    def sample(self) -> None:
        self.times_s.append(time.monotonic())
        self._work(len(self.times_s))
        self.ended_s = time.monotonic()

    def slots(self) -> float:
        """Periods from the start to the end of the last sample."""
        return (self.ended_s - self.begun_s) / self.every_s

    def stop(self) -> dict[str, Any]:
        self.stopped += 1
        return {"ticks": len(self.times_s)}


def run_for(
    seconds: float, *collectors: Metronome, until: Callable[[], object] = lambda: True
) -> tuple[list[Entry], list[str]]:
    """Sample as an agent does, on a thread for the fast and one for the slow; where these are late, for longer."""
    said: list[str] = []
    entries = [Entry(f"{number}", collector, said.append) for number, collector in enumerate(collectors)]
    groups = [[entry for entry in entries if entry.slow is slow] for slow in (False, True)]
    threads = [Sampler("one", group) for group in groups if group]
    for thread in threads:
        thread.start()
    try:
        time.sleep(seconds)
        wait_for(until)
    finally:
        for thread in threads:
            thread.stop()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return entries, said


def context(every_s: float) -> Context:
    return Context(Path("/nowhere"), every_s)


def test_the_schedule_is_absolute() -> None:
    """Samples that take time do not push the next ones back: 50 slots of 20 ms are a second, whatever each costs."""
    collector = Metronome(context(0.02), lambda _: time.sleep(0.012))
    ((entry,), _) = run_for(1.0, collector)
    taken = len(collector.times_s)
    assert taken + entry.facts["missed_samples"] == pytest.approx(collector.slots(), abs=3)
    late = [(at - collector.begun_s) % 0.02 for at in collector.times_s]
    on_time = [min(offset, 0.02 - offset) for offset in late]
    assert sorted(on_time)[len(on_time) // 2] < 0.005
    assert entry.facts["ticks"] == entry.facts["samples"] == taken


def test_slots_that_pass_are_counted_and_not_made_up_for() -> None:
    collector = Metronome(context(0.01), lambda count: time.sleep(0.3 if count == 10 else 0))
    ((entry,), _) = run_for(1.0, collector, until=lambda: len(collector.times_s) > 20)
    assert entry.facts["missed_samples"] >= 27
    gaps = [after - before for before, after in pairwise(collector.times_s)]
    assert gaps[9] > 0.29
    # a burst after the pause would show as gaps far below the period
    assert sum(gap < 0.002 for gap in gaps[10:20]) <= 3


def test_a_slow_collector_delays_no_fast_one() -> None:
    fast = Metronome(context(0.01))
    slow = Metronome(context(0.1), lambda _: time.sleep(0.25), slow=True)
    run_for(1.5, fast, slow, until=lambda: len(slow.times_s) >= 4)
    assert len(slow.times_s) <= 0.1 / 0.25 * slow.slots() + 1
    assert len(fast.times_s) > 0.8 * fast.slots()
    assert sorted(after - before for before, after in pairwise(fast.times_s))[-3] < 0.1


def test_even_one_that_computes_in_python() -> None:
    """It holds the interpreter's lock, but hands it on after half a millisecond, as the agent has it."""
    import sys

    def compute(_count: int) -> None:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            sum(range(1000))

    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        fast = Metronome(context(0.01))
        run_for(1.5, fast, Metronome(context(0.1), compute, slow=True))
    finally:
        sys.setswitchinterval(before)
    gaps = sorted(after - before for before, after in pairwise(fast.times_s))
    assert gaps[len(gaps) * 9 // 10] < 0.03


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENODEV, os.strerror(errno.ENODEV)), "stopped early: No such device"),
        (KeyError("port_xmit_data"), "stopped early: 'port_xmit_data'"),
    ],
)
def test_a_collector_that_fails_is_stopped_and_the_others_go_on(error: Exception, reason: str) -> None:
    def fail(count: int) -> None:
        if count == 5:
            raise error

    failing, other = Metronome(context(0.01), fail), Metronome(context(0.01))
    entries, said = run_for(0.5, failing, other, until=lambda: failing.stopped and len(other.times_s) > 30)
    assert (len(failing.times_s), failing.stopped) == (5, 1)
    assert (entries[0].facts["state"], entries[0].facts["reason"]) == ("failed", reason)
    assert entries[0].facts["ticks"] == 5
    assert (entries[1].facts["state"], other.stopped) == ("ok", 1)
    assert len(other.times_s) > 30
    (words,) = said
    assert ("Traceback" in words) == isinstance(error, KeyError)


def test_one_that_is_not_there_or_does_not_start() -> None:
    class Absent(Metronome):
        def check(self) -> Check:
            return Check("unavailable", "no such device", "plug one in")

    class Broken(Metronome):
        def start(self) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    absent, broken, other = Absent(context(0.01)), Broken(context(0.01)), Metronome(context(0.01))
    entries, _ = run_for(0.2, absent, broken, other, until=lambda: other.times_s)
    assert entries[0].facts == {"state": "unavailable", "reason": "no such device", "remedy": "plug one in"}
    assert entries[1].facts["reason"] == "could not be started: Permission denied"
    assert (absent.times_s, broken.times_s, absent.stopped) == ([], [], 0)
    assert other.times_s


def test_each_has_its_own_period() -> None:
    quick, lazy = Metronome(context(0.01)), Metronome(context(0.1))
    entries, _ = run_for(1.0, quick, lazy, until=lambda: lazy.times_s and len(quick.times_s) > 70)
    assert len(lazy.times_s) + entries[1].facts["missed_samples"] == pytest.approx(lazy.slots(), abs=1)


def test_a_long_period_does_not_hold_up_the_end() -> None:
    began = time.monotonic()
    run_for(0.1, Metronome(context(60.0)))
    assert time.monotonic() - began < 2


# -- what is asked for -------------------------------------------------------------------------------------------------

SIDE = ("steps", "ddp", "horovod", "nccl")
DEFAULT_SIDE = ("steps", "ddp", "nccl")  # Horovod's timeline costs a core


@pytest.mark.parametrize(
    ("words", "collectors", "recorders"),
    [
        ("default", DEFAULT, DEFAULT_SIDE),
        ("all", ORDER, SIDE),
        ("none", (), ()),
        ("nic,steps", ("nic",), ("steps",)),
        ("packets, NIC", ("nic", "packets"), ()),
        ("default,packets", ORDER, DEFAULT_SIDE),
        ("default,horovod", DEFAULT, SIDE),
        ("all,profile", ORDER, (*SIDE, "profile")),
    ],
)
def test_what_collect_means(words: str, collectors: tuple[str, ...], recorders: tuple[str, ...]) -> None:
    settings = parse_settings(words, "100ms", {})
    assert (settings.collectors, settings.recorders, settings.every_s) == (collectors, recorders, 0.1)
    assert RunSettings.from_json(settings.to_json()) == settings


def test_a_collector_may_have_a_period_of_its_own(tmp_path: Path) -> None:
    settings = parse_settings("nic,host", "50ms,host=2s", {})
    assert settings.line() == "collect=nic,host every=50ms host.every=2s"
    run = RunDirectory.create(tmp_path / "run", "job", [], 0, one_clock=True)
    recorders = Recorders(run, "here", RunSettings.from_json(settings.to_json()), list, print)
    recorders.start()
    while not recorders.are_ready():
        time.sleep(0.01)
    recorders.stop()
    facts = recorders.facts()
    assert (facts["nic"]["every_s"], facts["host"]["every_s"]) == (0.05, 2.0)


@pytest.mark.parametrize("every", ["100ms,host=2s", "host=2s"])
def test_a_collector_has_a_period_of_its_own_without_one_for_the_others(every: str) -> None:
    settings = parse_settings("nic,host", every, {})
    assert (settings.every_s, settings.options) == (0.1, {"host": {"every": "2s"}})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nik", "100ms", {}), "did you mean 'nic'"),
        (("stepps", "100ms", {}), "did you mean 'steps'"),
        (("nic", "0.1ms", {}), "outside 1ms to 60s"),
        (("nic", "2min", {}), "outside 1ms to 60s"),
        (("nic", "100ms", {"filter": "tcp"}), "--collect default,packets"),
        (("nic", "10ms,sockets=1s", {}), "'sockets' is not a collector that --collect names"),
        (("nic", "10ms,nic=0s", {}), "outside 1ms to 60s"),
    ],
)
def test_what_is_refused(arguments: tuple[str, str, dict[str, str]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_settings(*arguments)
