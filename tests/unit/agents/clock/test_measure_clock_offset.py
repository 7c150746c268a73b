"""Keepers of two nodes on one machine, whose clocks run apart and are set through the seam at the clock's source."""

import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringtap.agents.clock import clock_log as clock_account
from ringtap.agents.clock import measure_clock_offset as clock_reference
from ringtap.agents.clock.local_clock import Clock, StepWatch, adjtimex, boot_id, file_system
from ringtap.agents.clock.measure_clock_offset import ClockService, reference_of
from ringtap.core.append_only_logs import open_records
from ringtap.core.run_directory import RunDirectory

pytestmark = pytest.mark.shares


class Skewed(Clock):
    """A clock ahead of the machine's by so much, which runs off evenly and can be set."""

    def __init__(self, offset_ns: int = 0, drift_ppm: float = 0.0) -> None:
        self._offset_ns, self._drift_ppm = offset_ns, drift_ppm
        self._began_ns = time.time_ns()

    def offset_ns(self, real_ns: int) -> int:
        return self._offset_ns + round(self._drift_ppm * 1e-6 * (real_ns - self._began_ns))

    def real_ns(self) -> int:
        real_ns = time.time_ns()
        return real_ns + self.offset_ns(real_ns)

    def mono_ns(self) -> int:
        # slewing moves both clocks alike
        return time.monotonic_ns() + round(self._drift_ppm * 1e-6 * (time.time_ns() - self._began_ns))

    def of_kernel(self, stamp_ns: int) -> int:
        return stamp_ns + self.offset_ns(stamp_ns)

    def step(self, step_ns: int) -> None:
        self._offset_ns += step_ns


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", "job", [], 0)


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run directory look like one that other kernels may have mounted."""
    monkeypatch.setattr(clock_account, "file_system", lambda _: ("nfs", False))


@contextmanager
def keeping(run: RunDirectory, node: str, clock: Clock | None = None, period_s: float = 0.3) -> Iterator[ClockService]:
    keeper = ClockService(run, node, clock=clock, period_s=period_s)
    keeper.start()
    try:
        yield keeper
    finally:
        keeper.stop()


def account(run: RunDirectory, node: str) -> dict[str, Any]:
    item = json.loads((run.path / "nodes" / node / "clock" / "clock.json").read_text())
    assert isinstance(item, dict)
    return item


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.02)


def bursts(run: RunDirectory, node: str) -> int:
    """Bursts logged so far."""
    path = run.path / "nodes" / node / "clock" / "pings.rec"
    if not path.exists() or not path.stat().st_size:
        return 0
    return len({row[6] for row in open_records(path).walk()})


@pytest.mark.usefixtures("two_kernels")
@pytest.mark.parametrize(
    ("offset_ns", "drift_ppm"), [(0, 0.0), (12_345_678, 0.0), (-3_600_000_000_000, 50.0), (5_000_000, -80.0)]
)
def test_a_known_offset_and_drift_are_found_within_the_error(
    run: RunDirectory, offset_ns: int, drift_ppm: float
) -> None:
    clock = Skewed(offset_ns, drift_ppm)
    with keeping(run, "a"), keeping(run, "b", clock) as b:
        wait_until(lambda: bursts(run, "b") >= 4)
        summary = b.stop()
    assert summary["state"] == "ok"
    assert summary["source"] == "pings"
    item = account(run, "b")
    assert (item["reference"], item["clock"], item["steps"]) == ("a", "CLOCK_REALTIME", [])
    phases = [one["phase"] for one in item["measurements"]]
    assert phases[0] == "before"
    assert phases[-1] == "after"
    assert set(phases[1:-1]) == {"during"}
    for one in item["measurements"]:
        true_ns = clock.offset_ns(one["t_ns"] - offset_ns)
        assert abs(one["offset_ns"] - true_ns) <= one["error_ns"]
        assert one["error_ns"] == one["round_trip_ns"] // 2 + 1
    fit = item["fit"]
    for t_ns in (fit["from_ns"], fit["to_ns"]):
        found_ns = fit["offset_ns"] + fit["drift_ppm"] * 1e-6 * (t_ns - fit["t0_ns"])
        assert abs(found_ns - clock.offset_ns(t_ns - offset_ns)) <= fit["error_ns"]
    assert fit["error_ns"] >= min(one["error_ns"] for one in item["measurements"])
    assert fit["to_ns"] - fit["from_ns"] >= item["measurements"][-1]["t_ns"] - item["measurements"][0]["t_ns"]


@pytest.mark.alone(2)
@pytest.mark.usefixtures("two_kernels")
def test_a_step_of_this_nodes_clock_is_recorded_and_parts_the_segments(run: RunDirectory) -> None:
    clock = Skewed(1_000_000)
    with keeping(run, "a"), keeping(run, "b", clock) as b:
        wait_until(lambda: bursts(run, "b") >= 2)
        before_ns = time.monotonic_ns()
        clock.step(250_000_000)
        seen = bursts(run, "b")
        wait_until(lambda: bursts(run, "b") >= seen + 3)
        b.stop()
    item = account(run, "b")
    (step,) = item["steps"]
    assert step["step_ns"] == pytest.approx(250_000_000, abs=100_000)
    assert step["mono_before_ns"] <= before_ns <= step["mono_ns"]
    first, second = item["segments"]
    assert first["to_mono_ns"] == step["mono_before_ns"]
    assert second["from_mono_ns"] == step["mono_ns"]
    assert abs(first["offset_ns"] - 1_000_000) <= first["error_ns"]
    assert abs(second["offset_ns"] - 251_000_000) <= second["error_ns"]
    assert item["fit"]["error_ns"] > 50_000_000, "one line for all of it is that far off"


@pytest.mark.alone(2)
@pytest.mark.usefixtures("two_kernels")
def test_a_step_of_the_references_clock_parts_the_segments_when_it_was(run: RunDirectory) -> None:
    reference = Skewed()
    with keeping(run, "a", reference), keeping(run, "b", period_s=1.0) as b:
        wait_until(lambda: bursts(run, "b") >= 2)
        stepped_ns = time.monotonic_ns()
        reference.step(-40_000_000)
        seen = bursts(run, "b")
        wait_until(lambda: bursts(run, "b") >= seen + 2)
        b.stop()
    assert [round(step["step_ns"], -6) for step in account(run, "a")["steps"]] == [-40_000_000]
    item = account(run, "b")
    assert item["steps"] == []
    first, second = item["segments"]
    assert first["to_mono_ns"] <= stepped_ns + 5_000_000
    assert stepped_ns <= second["from_mono_ns"] <= stepped_ns + 1_500_000_000
    assert abs(first["offset_ns"]) <= first["error_ns"]
    assert abs(second["offset_ns"] - 40_000_000) <= second["error_ns"]


def test_nodes_on_one_kernel_have_one_clock(run: RunDirectory) -> None:
    """Boot identity and a local file system prove it; what was measured is told beside."""
    with keeping(run, "a"), keeping(run, "b") as b:
        wait_until(lambda: bursts(run, "b") >= 2)
        assert b.stop()["source"] == "same kernel"
    item = account(run, "b")
    assert (item["fit"]["offset_ns"], item["fit"]["error_ns"], item["fit"]["drift_ppm"]) == (0, 0, 0.0)
    assert all(abs(one["offset_ns"]) <= one["error_ns"] for one in item["measurements"])
    assert abs(item["measured"][0]["offset_ns"]) <= item["measured"][0]["error_ns"]


def sockets() -> int:
    return len(psutil.Process().net_connections("inet"))


def test_a_run_of_one_node_opens_no_socket(run: RunDirectory) -> None:
    before = sockets()
    with keeping(run, "a") as a:
        wait_until((run.path / "nodes/a/clock/clock.json").exists)
        (run.path / "nodes" / "S2" / "sent").mkdir(parents=True)  # a traffic generator's folder asks for no clock
        time.sleep(1)
        assert sockets() == before
        assert not (run.path / "nodes/a/clock/server.json").exists()
        summary = a.stop()
    assert (summary["state"], summary["offset_ns"], summary["error_ns"]) == ("ok", 0, 0)
    assert [path.name for path in (run.path / "nodes/a/clock").iterdir()] == ["clock.json"]


@pytest.mark.usefixtures("two_kernels")
def test_the_token_is_this_users_alone_and_goes_with_the_responder(run: RunDirectory) -> None:
    server = run.path / "nodes/a/clock/server.json"
    with keeping(run, "a"), keeping(run, "b"):
        wait_until(server.exists)
        assert stat.S_IMODE(server.stat().st_mode) == 0o600
        assert len(bytes.fromhex(json.loads(server.read_text())["token"])) == 16
        wait_until(lambda: bursts(run, "b") >= 1)
    item = json.loads(server.read_text())
    assert item["addresses"] == []
    assert "token" not in item
    assert account(run, "a")["pings_answered"] >= 20


@pytest.mark.usefixtures("two_kernels")
def test_the_reference_waits_a_moment_for_the_last_pings_of_the_others(run: RunDirectory) -> None:
    with keeping(run, "a") as a, keeping(run, "b") as b:
        wait_until(lambda: bursts(run, "b") >= 1)
        ending = threading.Thread(target=a.stop)
        ending.start()
        time.sleep(0.2)
        assert b.stop()["state"] == "ok"
        ending.join(5)
    assert account(run, "b")["measurements"][-1]["phase"] == "after"


@pytest.mark.alone(2)
@pytest.mark.usefixtures("two_kernels")
def test_a_reference_that_ends_early_leaves_what_was_measured(run: RunDirectory) -> None:
    with keeping(run, "b") as b, keeping(run, "a") as a:  # b was first, so b is the reference
        wait_until(lambda: bursts(run, "a") >= 1)
        b.stop()
        time.sleep(1.0)
        began_s = time.monotonic()
        summary = a.stop()
        assert time.monotonic() - began_s < 3
    assert summary["state"] == "ok"
    assert summary["source"] == "pings"
    item = account(run, "a")
    measured_s = (item["measurements"][-1]["mono_ns"] - item["measurements"][0]["mono_ns"]) / 1e9
    assert (item["fit"]["to_mono_ns"] - item["fit"]["from_mono_ns"]) / 1e9 >= measured_s + 0.9, "to the run's end"


@pytest.mark.usefixtures("two_kernels")
def test_without_a_word_from_the_reference_it_says_so(run: RunDirectory) -> None:
    run.info["reference"] = "elsewhere"
    with keeping(run, "b") as b:
        time.sleep(0.3)
        summary = b.stop()
    assert summary["state"] == "unavailable"
    assert summary["source"] == "none"
    assert "elsewhere" in summary["reason"]
    assert "share" in summary["remedy"]
    item = account(run, "b")
    assert item["fit"] is None
    assert item["segments"] == []
    assert item["reason"] == summary["reason"]


@pytest.mark.usefixtures("two_kernels")
def test_a_reference_whose_pings_are_blocked_leaves_the_time_daemons_promise(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronised = {"t_ns": time.time_ns(), "synchronised": True, "max_error_us": 1500}
    monkeypatch.setattr(clock_account, "adjtimex", lambda: dict(synchronised))
    monkeypatch.setattr(clock_reference, "addresses", lambda: [])
    with keeping(run, "a"), keeping(run, "b") as b:
        wait_until((run.path / "nodes/a/clock/server.json").exists)
        summary = b.stop()
    assert (summary["state"], summary["source"]) == ("degraded", "time daemons")
    assert summary["error_ns"] == pytest.approx(3_000_000, rel=0.01)
    assert "no socket" in summary["reason"]


def test_an_agent_that_comes_again_goes_on_with_what_is_there(run: RunDirectory) -> None:
    counts = []
    with keeping(run, "a"):
        for number in (1, 2):
            with keeping(run, "b"):
                wait_until(lambda number=number: bursts(run, "b") >= 2 * number)  # type: ignore[misc]
            counts.append(len(account(run, "b")["measurements"]))
    assert counts[0] >= 2
    assert counts[1] >= counts[0] + 1
    item = account(run, "b")
    assert item["measured"][0]["from_mono_ns"] <= item["measurements"][0]["mono_ns"]
    times = [row[1] for row in rows(run)]
    assert times == sorted(times)


def rows(run: RunDirectory) -> list[tuple[Any, ...]]:
    return open_records(run.path / "nodes/b/clock/pings.rec").tail()


@pytest.mark.usefixtures("two_kernels")
def test_a_reference_that_comes_again_is_found_again(run: RunDirectory) -> None:
    run.info["reference"] = "a"
    with keeping(run, "b"):
        with keeping(run, "a"):
            wait_until(lambda: bursts(run, "b") >= 1)
        with keeping(run, "a"):
            seen = bursts(run, "b")
            wait_until(lambda: bursts(run, "b") >= seen + 2)


def test_a_folder_that_cannot_be_written_harms_nothing(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    run.info["reference"] = "a"
    (run.path / "nodes").mkdir()
    (run.path / "nodes" / "b").write_text("a file where a folder should be")
    said: list[str] = []
    keeper = ClockService(run, "b", say=said.append)
    keeper.start()
    summary = keeper.stop()
    assert summary["state"] == "degraded"
    assert len(said) == 1
    assert said[0] == summary["reason"]


def test_a_stop_before_the_start_is_a_stop(run: RunDirectory) -> None:
    keeper = ClockService(run, "a")
    assert keeper.stop()["state"] == "unavailable"
    before = threading.active_count()
    keeper.start()
    assert threading.active_count() == before


def test_the_first_that_asks_is_the_reference(run: RunDirectory) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda name=name: found.append(reference_of(run, name))) for name in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert (run.path / "reference").read_text() == found[0] + "\n"
    run.info["reference"] = "named"
    assert reference_of(run, "a") == "named"


@pytest.mark.alone(2)
def test_slewing_is_no_step_and_setting_is() -> None:
    clock = Skewed(0, 400.0)
    watch = StepWatch(clock)
    time.sleep(0.05)
    assert watch.look() is None
    clock.step(-7_000_000)
    step = watch.look()
    assert step is not None
    assert step.step_ns == pytest.approx(-7_000_000, abs=50_000)
    assert step.mono_before_ns < step.mono_ns
    assert abs(step.t_ns - clock.real_ns()) < 10**9
    assert watch.look() is None


def test_what_the_kernel_says_of_its_clock() -> None:
    state = adjtimex()
    assert set(state) >= {"synchronised", "state", "max_error_us", "frequency_ppm"}
    assert isinstance(state["synchronised"], bool)
    assert state["synchronised"] == (state["state"] != "not synchronised")
    assert 0 <= state["max_error_us"] <= 16_000_000
    assert abs(state["frequency_ppm"]) <= 500
    assert len(boot_id()) == 36


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    kind, local = file_system(Path("/dev/shm"))
    assert (kind, local) == ("tmpfs", True)
    assert file_system(Path("/proc"))[1] is False, "what is not known counts as shared"
    with pytest.raises(OSError, match="No such file"):
        file_system(tmp_path / "missing")


@pytest.mark.alone(2)
@pytest.mark.usefixtures("two_kernels")
def test_it_costs_next_to_nothing(run: RunDirectory) -> None:
    """Both keepers of a pair together, pinging ten times as often as by default."""
    with keeping(run, "a", period_s=1.0), keeping(run, "b", period_s=1.0):
        wait_until(lambda: bursts(run, "b") >= 3)
        began = os.times()
        time.sleep(4)
        ended = os.times()
    busy_s = ended.user + ended.system - began.user - began.system
    assert busy_s <= 4 * 0.03
