"""The live view of a long run: what is gone is not kept, and the disk use of the recording is shown."""

from pathlib import Path

import pytest

from ringtap.agents.clock.clock_log import _MOST_MEASUREMENTS, _thinned
from ringtap.agents.clock.clock_offset_fit import Measurement, segments
from ringtap.agents.node import disk_use
from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.flows import _MAX_ENDED
from ringtap.analysis.live.follow_run import RunFollower
from ringtap.analysis.live.plain import line_of
from ringtap.analysis.live.summary import job_line
from tests.unit.live_run import START_NS, RunWriter, second_of_training

pytestmark = pytest.mark.shares

COUNT = 5000


def test_sockets_processes_and_restarted_ranks_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        follower, node = RunFollower(tmp_path / "run"), run.nodes["S0"]
        for number in range(COUNT):
            at, key = 1 + number, 10_000 + number
            ends = ("10.77.0.1", 20_000 + number, "10.77.0.9", 443)
            node.socket(at, key, ends, bytes_acked=1)
            node.socket(at + 0.5, key, ends, state=0, bytes_acked=2)
            node.line("sockets/owners.jsonl", t_ns=START_NS, inode=key, pid=key, rank=None, command="curl")
            node.line("host/processes.jsonl", t_ns=START_NS, pid=key, parent=1, rank=None, command="curl")
            node.process(at, key, 0.1)
            if number % 1000 == 0:  # the job is restarted
                for step in range(20):
                    node.step(0, 100 + number, step, at + step)
                follower.poll()
        ends = ("10.77.0.1", 40_000, "10.77.0.9", 29_500)
        node.socket(COUNT + 2, 1, ends, inode=1, bytes_acked=1)
        node.process(COUNT + 2, 7, 0.1)
        follower.poll()
        seen = follower.nodes["S0"]
        assert list(seen.keyed["sockets", "sockets"].latest) == [1]
        assert 7 in seen.keyed["host", "processes"].latest
        assert len(seen.keyed["host", "processes"].latest) < 250, "those of the last minutes"
        assert len(seen.owners.processes) <= 2 * _MAX_ENDED + 250
        assert len(seen.owners._by_inode) <= 2 * _MAX_ENDED + 1
        assert seen.owners.of(10_000 + COUNT - 1).command == "curl"
        ranks = sorted(follower.ranks, key=lambda steps: steps.generation)
        assert [len(steps.ends) for steps in ranks] == [0, 0, 0, 20, 20]
        assert [steps.timed_steps for steps in ranks] == [19] * 5


def test_disk_use_is_shown_with_its_growth_after_a_minute(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        for second in (1, 2):
            second_of_training(run, second)
        source = SnapshotSource(tmp_path / "run")
        run.nodes["S0"].node(disk={"bytes": 2_000_000})
        line = dict(word.split("=", 1) for word in line_of(source.take()).split())
        assert (line["disk_bytes"], line["disk_bytes_per_hour"]) == ("2000000", "-")
        run.nodes["S0"].node(disk={"bytes": 3_000_000, "bytes_per_hour": 60_000_000})
        run.nodes["S1"].node(disk={"bytes": 1_000_000, "bytes_per_hour": 20_000_000, "limit_bytes": 10**9})
        snapshot = source.take()
        line = dict(word.split("=", 1) for word in line_of(snapshot).split())
        assert (line["disk_bytes"], line["disk_bytes_per_hour"]) == ("4000000", "80000000")
        assert "disk 4 MB, 80 MB/h" in job_line(snapshot, "").plain
        assert "disk 1 MB, 20 MB/h" in job_line(snapshot, "S1").plain


def test_growth_is_that_of_the_last_minute_and_counts_deleted_packets(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    now_s = [1000.0]
    monkeypatch.setattr(disk_use.time, "monotonic", lambda: now_s[0])
    (tmp_path / "packets").mkdir()
    log, facts = tmp_path / "log", tmp_path / "packets/packets.json"
    use = disk_use.DiskUse(tmp_path, 1_000_000)
    for second in range(200):
        log.write_bytes(bytes(100 * second if second < 100 else 9_900))
        use.look()
        assert ("bytes_per_hour" in use.facts) == (second >= 60)
        assert use.facts.get("bytes_per_hour", 360_000) == 360_000 or second >= 100
        now_s[0] += 1
    assert use.facts == {"bytes": 9_900, "bytes_per_hour": 0, "limit_bytes": 1_000_000}
    assert not use.is_full
    facts.write_text('{"deleted_bytes": 60000}')
    log.write_bytes(bytes(1_000_000))
    use.look()
    assert use.facts["bytes_per_hour"] == (60_000 + 990_100 + facts.stat().st_size) * 60
    assert not use.is_full, "a collector may still delete files"
    use.look()
    use.look()
    assert use.is_full


def test_a_day_of_pings_is_thinned_and_still_bounds_the_clock() -> None:
    measurements: list[Measurement] = []
    for number in range(8640):  # one in 10 s; a drift of 2 ppm, and errors of 10 to 40 µs
        mono_ns = number * 10 * 10**9
        error_ns = 10_000 + number * 7919 % 30_000
        found = Measurement(
            START_NS + mono_ns, mono_ns, "during", 500 + mono_ns // 500_000, error_ns, 2 * error_ns, 8, 0
        )
        measurements = _thinned([*measurements, found])
    assert len(measurements) <= _MOST_MEASUREMENTS
    assert measurements[0].mono_ns == 0
    assert measurements[-1].mono_ns == mono_ns
    assert [one.mono_ns for one in measurements] == sorted({one.mono_ns for one in measurements})
    (line,) = segments(measurements)
    assert abs(line.drift_ppm - 2) < 0.01
    assert line.error_ns < 15_000
