"""Packets around slow iterations: which iterations are slow, and which packets are kept."""

import json
import math
import random
import struct
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.agents.node.recording_settings import parse_settings
from ringtap.collectors.packets_around_slow_iterations import PacketWindows
from ringtap.collectors.slow_iterations import (
    MIN_ITERATIONS,
    RecentTimes,
    SlowIteration,
    SlowIterations,
    SlowRule,
    parse_rule,
)
from ringtap.core.append_only_logs import RecordWriter
from ringtap.core.errors import UsageError
from tests.unit.live_run import STEPS

pytestmark = pytest.mark.shares

MS = 1_000_000
BEGIN_NS = 1_800_000_000 * 10**9
HEADER = struct.pack("=IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 128, 1)


def packet(t_ns: int) -> bytes:
    return struct.pack("=IIII", *divmod(t_ns, 10**9), 8, 8) + t_ns.to_bytes(8, "big")


def times_in(path: Path) -> list[int]:
    data = path.read_bytes()
    assert data[:24] == HEADER
    assert len(data) % 24 == 0
    return [int.from_bytes(data[at + 16 : at + 24], "big") for at in range(24, len(data), 24)]


class Steps:
    """The step log of one process."""

    def __init__(self, folder: Path, rank: int, pid: int) -> None:
        self._log = RecordWriter(folder / f"rank{rank}-{pid}.rec", STEPS, {"rank": rank})

    def end(self, step: int, end_ns: int, kind: int = 0, optimizer: int = 0) -> None:
        mono_ns = end_ns - BEGIN_NS + 1
        self._log.append(step, optimizer, end_ns, end_ns, mono_ns, mono_ns, kind, 1)


def test_a_rule_is_a_percentile_and_a_time() -> None:
    assert parse_rule("p99:5s") == SlowRule(0.99, 5.0)
    assert parse_rule("p99.9:250ms") == SlowRule(0.999, 0.25)
    for wrong in ("", "p99", "99:5s", "p100:5s", "p10:5s", "p99:5", "p99:0s", "p99:-1s", "p99:1parsec", "pp:1s"):
        with pytest.raises(UsageError, match="--packets-around-slow") as error:
            parse_settings("default,packets", "100ms", {"around_slow": wrong})
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="add steps to --collect"):
        parse_settings("nic,packets", "100ms", {"around_slow": "p99:5s"})
    with pytest.raises(UsageError, match="add --collect default,packets"):
        parse_settings("default", "100ms", {"around_slow": "p99:5s"})


@given(st.lists(st.floats(0.001, 10), max_size=400), st.integers(100, 200), st.floats(0.5, 0.9999))
@settings(max_examples=15)
def test_the_percentile_is_that_of_the_newest_times(times: list[float], kept: int, share: float) -> None:
    recent = RecentTimes(kept)
    for number, time_s in enumerate(times):
        newest = sorted(times[max(0, number - kept) : number])
        few = len(newest) < MIN_ITERATIONS
        assert recent.quantile(share) == (None if few else newest[math.ceil(share * len(newest) - 1e-9) - 1])
        recent.add(time_s)


def test_each_process_is_compared_with_its_own_iterations(tmp_path: Path) -> None:
    slow, first, second = SlowIterations(tmp_path, 0.99), Steps(tmp_path, 0, 100), Steps(tmp_path, 1, 101)
    assert (slow.poll(), slow.reached_ns) == ([], None)
    t_ns = BEGIN_NS
    for step in range(300):
        t_ns += 500 * MS if step in (50, 200) else 100 * MS + step  # the first is before there are enough
        first.end(step, t_ns)
        first.end(step, t_ns, optimizer=1)  # does not count
        if step < 299:
            second.end(step, t_ns + 5 * MS)
        if step == 150:
            # each is longer than the one before, by a nanosecond: slow are those over the second longest so far
            assert [one.step for one in slow.poll() if one.rank == 0] == list(range(101, 151))
    found = slow.poll()
    (long,) = [one for one in found if one.rank == 0 and one.step == 200]
    assert long.end_ns - long.begin_ns == 500 * MS
    assert long.threshold_s == pytest.approx(0.1, abs=1e-6)
    assert slow.reached_ns == t_ns - 100 * MS - 299 + 5 * MS, "rank 1 has not ended the last iteration"
    # a process that ended does not hold back the others
    for step in range(300, 410):
        first.end(step, BEGIN_NS + step * 10**9)
        slow.poll()
    assert slow.reached_ns == BEGIN_NS + 409 * 10**9


def test_a_new_optimizer_begins_anew_and_a_round_is_an_iteration(tmp_path: Path) -> None:
    """Iterations of 3 s after those of 1 s are not slow; nor is a round of two optimizers after single steps."""
    slow, steps = SlowIterations(tmp_path, 0.5), Steps(tmp_path, 0, 100)
    for step in range(120):
        steps.end(step, BEGIN_NS + step * 10**9)
    t_ns = BEGIN_NS + 200 * 10**9
    for step in range(120):
        t_ns += 3 * 10**9 + (step == 119)
        steps.end(step, t_ns, optimizer=1)
    assert [(one.step, one.threshold_s) for one in slow.poll()] == [(119, 3.0)]
    t_ns += 10**12
    for number in range(120):
        t_ns += 5 * 10**9 + (number == 119)
        steps.end(number, t_ns, optimizer=2)
        steps.end(number, t_ns + 10**8, optimizer=3)
    assert [(one.step, one.threshold_s) for one in slow.poll()] == [(119, 5.0)]


def test_marks_count_instead_of_steps(tmp_path: Path) -> None:
    slow, steps = SlowIterations(tmp_path, 0.5), Steps(tmp_path, 0, 100)
    steps.end(0, BEGIN_NS)
    for mark in range(120):
        steps.end(mark, BEGIN_NS + mark * 10**9 + (mark == 119), kind=2, optimizer=-1)
        steps.end(mark, BEGIN_NS + mark * 10**9 + 3, optimizer=0)
    assert [(one.step, one.threshold_s) for one in slow.poll()] == [(119, 1.0)]


@given(st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_the_windows_are_kept_exactly(seed: random.Random) -> None:
    """Against a filter over all packets, for any iterations, looks and sizes of files."""
    around_ns = seed.choice([0, 30, 200, 1500]) * MS
    ends = [BEGIN_NS]
    while len(ends) < 60:
        ends.append(ends[-1] + seed.choice([20, 50, 900, 4000]) * MS)
    packets = sorted(BEGIN_NS + seed.randrange(ends[-1] - BEGIN_NS + 10**9) for _ in range(seed.randrange(400)))
    iterations = [SlowIteration(0, step, *both, 0.1) for step, both in enumerate(pairwise(ends))]
    slow = [one for one in iterations if seed.random() < 0.1]
    wanted = [
        t_ns for t_ns in packets if any(one.begin_ns - around_ns <= t_ns <= one.end_ns + around_ns for one in slow)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "packets")
        (folder / ".ring").mkdir(parents=True)
        windows = PacketWindows(folder, "lo", around_ns, BEGIN_NS - 10**10, seed.choice([200, 10**6]))
        files, left, told = [folder / ".ring/0.pcap"], list(packets), 0
        files[0].write_bytes(HEADER)
        for step, end_ns in enumerate(ends[1:]):
            while left and left[0] <= end_ns:
                with files[-1].open("ab") as file:
                    file.write(packet(left.pop(0)))
                if files[-1].stat().st_size > 24 * 8:
                    files.append(folder / f".ring/{len(files)}.pcap")
                    files[-1].write_bytes(HEADER)
            if seed.random() < 0.5:
                windows.add([one for one in slow if told <= one.step <= step])
                told = step + 1
                windows.decide([path for path in files if path.exists()], end_ns)
        with files[-1].open("ab") as file:
            file.write(b"".join(packet(t_ns) for t_ns in left) + packet(BEGIN_NS)[:-1])  # torn
        windows.add([one for one in slow if told <= one.step])
        windows.finish([path for path in files if path.exists()])
        assert not any((folder / ".ring").iterdir())
        lines = [json.loads(line) for line in (folder / "lo-windows.jsonl").read_text().splitlines()]
        kept = [t_ns for line in lines for file in line["files"] for t_ns in times_in(folder / file)]
        assert sorted(kept) == wanted
        assert [line["packets"] for line in lines] == [
            sum(line["begin_ns"] <= t_ns <= line["end_ns"] for t_ns in wanted) for line in lines
        ]
        assert sum(line["slow_iterations"] for line in lines) == len(slow) == windows_slow(lines)
        assert all(before["end_ns"] < after["begin_ns"] for before, after in pairwise(lines)), "overlapping ones merge"


def windows_slow(lines: list[dict[str, list[dict[str, int]]]]) -> int:
    """The slow iterations that lie in their windows."""
    return sum(
        line["begin_ns"] <= one["begin_ns"] and one["end_ns"] <= line["end_ns"]  # type: ignore[operator]
        for line in lines
        for one in line["iterations"]
    )
