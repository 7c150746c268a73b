"""What logs of a host's links and counters say of a window."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.hosts import LocalHosts
from ringtap.agents.sweep import detect_disturbances
from ringtap.agents.sweep.detect_disturbances import (
    ConnectionBytes,
    Watch,
    change_place,
    counted_bps,
    late_share,
    wait_for_samples,
)
from ringtap.agents.sweep.host_roles import Attachment, SweepRoles
from ringtap.agents.sweep.measurement_windows import Condition, JobWindows, MeasuredJob, WindowSpan
from ringtap.agents.sweep.step_watcher import StepWatcher
from ringtap.agents.testbed.topology import Roles
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.run_directory import RunDirectory
from ringtap.core.units import format_change
from tests.unit.agents.sweep.test_cluster_preflight_cluster import plan_of
from tests.unit.live_run import SOCKETS, NodeWriter

pytestmark = pytest.mark.shares

S = 1_000_000_000
STAGE = SweepRoles(
    roles=Roles("custom", ("a",), "", ""),
    recorded=("a",),
    training={},
    cross={},
    interface={},
    bottleneck={"total": [{"node": "a", "nic": "eth0", "direction": "rx"}], "cross": [], "mtu": 1500},
    one_clock=True,
    iperf3={},
    links={"a": ("eth0",)},
)


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([(0, True, 2)], []),
        ([(0, True, 2), (12, False, 3), (17, True, 4)], ["eth0 of a had no link for 5.0 s"]),
        ([(0, True, 2), (8.5, False, 3), (9.5, True, 4)], ["eth0 of a had no link for 1.0 s"]),
        ([(0, True, 2), (2, False, 3), (9, True, 4)], ["eth0 of a had no link for 7.0 s"]),
        ([(0, True, 2), (2, False, 3), (5, True, 4)], []),
        ([(0, True, 2), (21, False, 3), (22, True, 4)], []),
        ([(0, True, 2), (15, False, 3)], ["eth0 of a had no link to the end of the window"]),
        ([(0, False, 1)], ["eth0 of a had no link to the end of the window"]),
        ([(0, True, 2), (15, True, 4)], ["eth0 of a lost its link for a moment"]),
    ],
)
def test_a_cut_link_disturbs_the_window_that_it_touches(
    states: list[tuple[float, bool, int]], words: list[str], tmp_path: Path
) -> None:
    log = JsonLinesWriter(tmp_path / "nodes" / "a" / "nic" / "links.jsonl")
    for seconds, carrier, changes in states:
        log.append({"t_ns": round(seconds * S), "nic": "eth0", "carrier": carrier, "carrier_changes": changes})
    log.close()
    watch = Watch(tmp_path, STAGE, 10**9, 0)
    assert list(watch.links(8 * S, 20 * S, 10 * S)) == words
    assert watch.other_bps(10 * S, 20 * S) == (None, "")
    assert watch.others([(watch, STAGE.attachments)], 10 * S, 20 * S) == []


@pytest.mark.parametrize(
    "line",
    [
        {"nic": "eth0", "carrier": True, "carrier_changes": 2},
        {"t_ns": "1", "nic": "eth0", "carrier": True, "carrier_changes": 2},
        {"t_ns": 1, "nic": ["eth0"], "carrier": True, "carrier_changes": 2},
        {"t_ns": 1, "nic": "eth0", "carrier": "yes", "carrier_changes": 2},
        {"t_ns": 1, "nic": "eth0", "carrier": True, "carrier_changes": 1.5},
        {"t_ns": 1, "nic": "eth0", "carrier": True},
    ],
)
def test_a_link_state_of_another_shape_is_refused_in_a_sentence(line: dict[str, Any], tmp_path: Path) -> None:
    log = JsonLinesWriter(tmp_path / "nodes" / "a" / "nic" / "links.jsonl")
    log.append({"t_ns": 1, "nic": "eth0", "carrier": True, "carrier_changes": None})
    log.append(line)
    log.close()
    with pytest.raises(UsageError, match=r"links\.jsonl line 2 cannot be used: "):
        list(Watch(tmp_path, STAGE, 10**9, 0).links(8 * S, 20 * S, 10 * S))


FIELDS = [
    *(Field(name, "<i8", "ns", "time") for name in ("t_ns", "mono_ns")),
    *(Field(f"eth0.rx_{name}", "<i8", "", "counter") for name in ("bytes", "packets")),
]


@pytest.mark.parametrize(
    ("ends_s", "mbps", "words"),
    [
        (
            [10, 10.2, 10.4, 10.6, 15.6, 15.8],
            300,
            ["an iteration took 5 s, usually 0.2 s, with the bottleneck 30% used"],
        ),
        ([10, 10.2, 10.4, 10.6, 15.6, 15.8], 990, []),  # congestion
        ([10, 10.2, 10.4, 10.6, 11.9, 12.1], 300, []),  # as after losses in a row
        ([10, 12, 14, 16, 25, 27], 300, []),  # less than five times as long
        ([10, 15, 15.2], 300, []),  # of two, none is usual
        ([10, 15], 300, []),
    ],
)
def test_an_iteration_that_no_congestion_explains_disturbs_the_window(
    ends_s: list[float], mbps: float, words: list[str], tmp_path: Path
) -> None:
    log = RecordWriter(tmp_path / "nodes" / "a" / "nic" / "nic.rec", FIELDS, {"every_s": 0.1})
    for number in range(400):
        payload_bytes = round(number * mbps * 1e6 / 8 / 10)
        log.append(number * S // 10, number * S // 10, payload_bytes, payload_bytes // 1500)
    log.close()
    ends_ns = [round(end_s * S) for end_s in ends_s]
    assert Watch(tmp_path, STAGE, 10**9, 0).stall(ends_ns) == words


@pytest.mark.parametrize("remote", ["10.0.0.4", "10.0.0.2"])
def test_cross_traffic_is_told_by_the_receivers_address_and_port(remote: str, tmp_path: Path) -> None:
    """A training connection may have the same port number at its own end, or at another host."""
    node = NodeWriter(tmp_path, "a")
    fields = [*SOCKETS, *(Field(f"segs_{way}", "<u4", "", "counter", 32) for way in ("in", "out"))]
    ports = 40123, 50000
    for at in range(4):
        node.nic(at, eth0=(0, at * 1_000_000))
        row: dict[str, Any] = dict.fromkeys((field.name for field in fields), 0)
        row |= dict(zip(("t_ns", "mono_ns"), node.t(at), strict=True)) | {"family": 2, "cookie": 7}
        row |= {
            name: ip_address(address).packed.ljust(16, b"\0")
            for name, address in (("source", "10.0.0.1"), ("destination", remote))
        }
        own, other = ports if remote == "10.0.0.2" else reversed(ports)
        row |= {"sport": own.to_bytes(2, "big"), "dport": other.to_bytes(2, "big")}
        row |= {"bytes_sent": at * 1_000_000, "bytes_acked": at * 1_000_000}
        node.records("sockets/sockets.rec", fields, tuple(row.values()))
    node.close()
    port = Attachment(("eth0",), frozenset({"10.0.0.1"}))
    connections = ConnectionBytes(node.folder, port, ("10.0.0.4", 40123), lambda _: 1500)
    found = connections.rates(node.t(0)[0], node.t(3)[0])
    assert found.acknowledged_bps == pytest.approx(8e6 if remote == "10.0.0.4" else 0)


def test_without_counters_a_stall_cannot_be_told_from_congestion(tmp_path: Path) -> None:
    assert Watch(tmp_path, STAGE, 10**9, 0).stall([10 * S, 11 * S, 12 * S, 30 * S]) == []


STEP_FIELDS = [
    *(Field(name, "<u4", "", "index") for name in ("step", "optimizer")),
    *(Field(f"{side}{clock}_ns", "<i8", "ns", "time") for clock in ("", "_mono") for side in ("start", "end")),
    *(Field(name, kind, "", "gauge") for name, kind in (("kind", "<u1"), ("pause_ns", "<i8"))),
]


def write_a_set_clock(run: RunDirectory, node: str, set_s: float, step_s: float) -> None:
    """Counters of 100 Mbit/s for 40 s, and iterations of 0.5 s; the clock is set after some seconds."""
    gap_ns = 1_700_000_000 * S

    def shown_ns(mono_s: float) -> int:
        return round((mono_s + (step_s if mono_s >= set_s else 0)) * S) + gap_ns

    log = RecordWriter(run.node(node) / "nic" / "nic.rec", FIELDS, {"every_s": 0.1})
    for number in range(400):
        size_bytes = number * 1_250_000
        log.append(shown_ns(number / 10), number * S // 10, size_bytes, size_bytes // 1500)
    log.close()
    steps = RecordWriter(run.node(node) / "steps" / "rank0-7.rec", STEP_FIELDS, {})
    for number in range(80):
        end_s = number / 2
        steps.append(number, 0, *(shown_ns(end_s),) * 2, *(round(end_s * S),) * 2, 0, 0)
    steps.close()


@pytest.mark.parametrize("step_s", [1.0, -1.0, 3600.0, -3600.0, 0.03, -0.015])
def test_a_clock_that_is_set_moves_no_times_and_disturbs_its_window_only(step_s: float, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    write_a_set_clock(run, "a", 15, step_s)
    gap_ns = 1_700_000_000 * S
    ends_ns = StepWatcher(run, {"a": 1}).iteration_ends_ns()
    assert ends_ns == [gap_ns + number * S // 2 for number in range(80)]
    assert StepWatcher(run, {"a": 1}).iteration_begins_ns() == ends_ns
    watch = Watch(run.path, STAGE, 10**9, 0)
    words = f"the clock of a was set by {format_change(step_s)}"
    words = [words] if abs(step_s) > 0.02 else []  # a small step disturbs nothing
    for since_s, until_s, expected in ((2, 12, []), (10, 20, words), (20, 30, [])):
        window_ns = gap_ns + since_s * S, gap_ns + until_s * S
        assert list(watch.links(window_ns[0] - 2 * S, window_ns[1], window_ns[0])) == expected
        assert late_share(run.path / "nodes" / "a" / "nic" / "nic.rec", *window_ns) == 0
        counter = {"node": "a", "nic": "eth0", "direction": "rx"}
        assert counted_bps(run.path, counter, 1500, *window_ns) == pytest.approx(100e6, rel=0.01)


def rates_log(run: Path, mbps: Sequence[float]) -> None:
    """Counters that grew at these rates, one per second from second 0 on."""
    log = RecordWriter(run / "nodes" / "a" / "nic" / "nic.rec", FIELDS, {"every_s": 0.1})
    size_bytes = 0.0
    for number in range(10 * len(mbps)):
        log.append(number * S // 10, number * S // 10, round(size_bytes), round(size_bytes) // 1500)
        size_bytes += mbps[number // 10] * 1e6 / 80
    log.close()


def ends_of(times_s: Sequence[float]) -> list[int]:
    return [round(S * (5 + end_s)) for end_s in accumulate(times_s, initial=0.0)]


HALVED = [0.20, 0.21, 0.19, 0.2, 0.22, 0.2, 0.21, 0.19, 0.2, 0.2, 0.35, 0.33, 0.36, 0.34, 0.35, 0.36]


def test_a_link_that_is_halved_within_a_window_changes_its_iterations(tmp_path: Path) -> None:
    rates_log(tmp_path, [800] * 7 + [500] * 9)
    found = Watch(tmp_path, STAGE, 10**9, 0).change(ends_of(HALVED))
    assert found is not None
    assert re.fullmatch(
        r"iterations changed from 0\.2 to 0\.35 s, and the used part of the bottleneck from 8\d% to 5\d%", str(found)
    )
    assert found.lasts(0.34)
    assert not found.lasts(0.21)
    # the rest of a link that is halved may be all but enough
    fifth = [0.2 + 0.01 * (number % 3) for number in range(10)] + [0.24] * 6
    assert "from 0.21 to 0.24 s" in str(Watch(tmp_path, STAGE, 10**9, 0).change(ends_of(fifth)))


@pytest.mark.parametrize(
    ("times_s", "mbps"),
    [
        (HALVED, [500] * 7 + [900] * 9),  # more load, which the iterations share
        (HALVED, [800] * 16),
        ([0.2, 0.35] * 8, [800] * 7 + [500] * 9),  # no change at one moment
        ([0.2] * 10 + [0.215] * 6, [800] * 7 + [500] * 9),  # less than by a tenth
        ([0.2] * 4 + [0.35] * 4, [800] * 6 + [500] * 10),  # too few
    ],
)
def test_iterations_that_more_load_explains_or_that_vary_do_not_change(
    times_s: list[float], mbps: list[float], tmp_path: Path
) -> None:
    rates_log(tmp_path, mbps)
    assert Watch(tmp_path, STAGE, 10**9, 0).change(ends_of(times_s)) is None


def test_a_change_is_where_it_was_made_and_rare_by_chance() -> None:
    draw = random.Random(43)
    alarms = 0
    for _ in range(300):
        place, slow = draw.randint(8, 22), draw.choice([1.6, 1 / 1.6])
        times_s = [math.exp(draw.gauss(0, 0.08)) for _ in range(30)]
        alarms += change_place(times_s) is not None
        # as others of the machine come and go
        alarms += change_place([time_s * 1.05 ** draw.randint(0, 2) for time_s in times_s]) is not None
        found = change_place([time_s * (slow if number >= place else 1) for number, time_s in enumerate(times_s)])
        assert found is not None
        assert abs(found - place) <= 1
    assert alarms == 0


def test_the_most_used_of_several_links_tells_a_stall_from_congestion(tmp_path: Path) -> None:
    rates_log(tmp_path, [950] * 40)
    counters = [{"node": "a", "nic": "eth0", "direction": "rx"}] * 2
    stage = replace(
        STAGE, bottleneck=STAGE.bottleneck | {"total": [counters[0] | {"rate_bps": 4 * 10**9}, counters[1]]}
    )
    ends_ns = [round(S * end_s) for end_s in (10, 10.2, 10.4, 10.6, 15.6, 15.8)]
    assert Watch(tmp_path, stage, 10**9, 0, has_one_bottleneck=False).stall(ends_ns) == []
    slow = replace(STAGE, bottleneck=STAGE.bottleneck | {"total": [counters[0] | {"rate_bps": 4 * 10**9}]})
    assert len(Watch(tmp_path, slow, 10**9, 0, has_one_bottleneck=False).stall(ends_ns)) == 1


def test_iterations_that_stay_longer_at_the_same_load_end_the_series(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    rates_log(run.path, [800] * 7 + [500] * 23)
    steps = RecordWriter(run.node("a") / "steps" / "rank0-7.rec", STEP_FIELDS, {})
    for number, end_ns in enumerate(ends_of([*HALVED, *[0.35] * 20])):
        steps.append(number, 0, *(end_ns,) * 4, 0, 0)
    steps.close()
    plan, roles = plan_of(tmp_path), replace(STAGE, roles=replace(STAGE.roles, workers=("a",)))
    for tolerant in (False, True):
        windows, steps = JobWindows(plan, LocalHosts(["a"]), Condition(), tolerant=tolerant), StepWatcher(run, {"a": 1})
        job = MeasuredJob(plan.models[0], roles, run, Watch(run.path, roles, 10**9, 0), steps, ["a"], [])
        windows.jobs = [job]
        ends_ns = steps.iteration_ends_ns()
        (words,) = windows._within(WindowSpan(ends_ns[0], ends_ns[16], 16))
        assert words.startswith("iterations changed from 0.2 to 0.35 s")
        after = WindowSpan(ends_ns[17], ends_ns[-1], len(ends_ns) - 18)
        if tolerant:
            (again,) = windows._within(after)
            assert again.endswith(", and still take 0.35 s: a link or a host has become slower")
        else:
            with pytest.raises(MeasurementError, match=r"at the same load, iterations .*: see to it, then resume$"):
                windows._within(after)
        windows.jobs = [job, job]
        assert windows._within(WindowSpan(ends_ns[0], ends_ns[16], 16)) == [], (
            "several jobs change each other's iterations"
        )


def test_a_host_whose_agent_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    rates_log(run.path, [100] * 10)
    monkeypatch.setattr(detect_disturbances, "_SILENT_S", 0.1)
    hosts = LocalHosts(["a"])
    wait_for_samples(hosts, run.path, 9 * S)
    with pytest.raises(MeasurementError, match=r"^a recorded nothing up to the end of the window: .*nodes/a/log/agent"):
        wait_for_samples(hosts, run.path, 12 * S)
