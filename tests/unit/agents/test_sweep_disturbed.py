"""What logs of a host's links and counters say of a window."""

from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.sweep.disturbances import Watch
from ringtap.agents.sweep.roles import SweepRoles
from ringtap.agents.testbed.topology import Roles
from ringtap.errors import UsageError
from ringtap.records import Field, JsonLinesWriter, RecordWriter

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
    found = Watch(tmp_path, STAGE, 10**9, 0).window(10 * S, 20 * S, 2.0)
    assert list(found.links) == words
    assert (found.other_bps, found.others) == (None, ())


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
        Watch(tmp_path, STAGE, 10**9, 0).window(10 * S, 20 * S, 2.0)


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


def test_without_counters_a_stall_cannot_be_told_from_congestion(tmp_path: Path) -> None:
    assert Watch(tmp_path, STAGE, 10**9, 0).stall([10 * S, 11 * S, 12 * S, 30 * S]) == []
