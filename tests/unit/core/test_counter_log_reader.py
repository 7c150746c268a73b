import json

import numpy as np
import pytest

from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.counter_log_reader import CounterLog
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.together]

START_NS = 1_700_000_000_000_000_000
SECOND = 10**9


def log(node, values, width_bits=64, every_ns=SECOND // 10):
    path = node / "own" / "own.rec"
    path.parent.mkdir(parents=True)
    kind = "<u4" if width_bits == 32 else "<u8"
    times = [Field(name, "<i8", "ns", "time") for name in ("t_ns", "mono_ns")]
    fields = [*times, Field("a", kind, "bytes", "counter", width_bits)]
    writer = RecordWriter(path, fields, {})
    writer.append_many(
        [(START_NS + number * every_ns, number * every_ns, int(value)) for number, value in enumerate(values)]
    )
    writer.close()
    return CounterLog(path)


def test_growth_is_linear_between_samples(tmp_path):
    found = log(tmp_path / "a", 1000 * np.arange(101) + 2**53)  # beyond what a float holds exactly
    assert found.grown("t_ns", START_NS, START_NS + SECOND) == "was not recorded"
    assert found.grown("a", START_NS + 2 * SECOND, START_NS + 8 * SECOND) == 60_000
    # edges within a tenth of a second
    assert found.grown("a", START_NS + SECOND + 25_000_000, START_NS + 9 * SECOND - 50_000_000) == pytest.approx(79_250)
    assert found.grown("a", START_NS, START_NS + 10 * SECOND) == 100_000


def test_narrow_counters_wrap(tmp_path):
    values = (2**32 - 3000 + 1000 * np.arange(101)) % 2**32
    assert log(tmp_path / "a", values, 32).grown("a", START_NS + SECOND, START_NS + 9 * SECOND) == 80_000


@pytest.mark.parametrize(
    ("start_s", "end_s", "says"),
    [(-1, 5, "does not cover"), (1, 11, "does not cover"), (4.5, 5.5, "was reset")],
)
def test_what_is_wrong_is_said(tmp_path, start_s, end_s, says):
    values = 1000 * np.arange(101)
    values[50] = 0
    found = log(tmp_path / "a", values).grown("a", START_NS + int(start_s * SECOND), START_NS + int(end_s * SECOND))
    assert says in found


def test_an_empty_log_has_no_counters(tmp_path):
    assert log(tmp_path / "a", []).grown("a", START_NS, START_NS + 1) == "was not recorded"
    assert log(tmp_path / "b", [1]).grown("a", START_NS, START_NS + 1) == "does not cover the window"


@pytest.mark.parametrize(
    ("before", "after", "stated", "expected"),
    [
        (9000, 9000, 1500, 9000),
        (9000, None, None, 9000),
        (None, None, 1500, 1500),
        (None, None, None, "the MTU of eth0 of node S0 was not recorded"),
        (9000, 1500, 1500, "the MTU of eth0 of node S0 was changed from 9000 to 1500"),
    ],
)
def test_frames_are_those_of_the_interfaces_own_mtu(tmp_path, before, after, stated, expected):
    path = tmp_path / "nodes" / "S0" / "nic" / "nic.rec"
    fields = [Field(name, "<i8", "ns", "time") for name in ("t_ns", "mono_ns")]
    fields += [Field(f"eth0.{what}", "<u8", what[3:], "counter", 64) for what in ("rx_bytes", "rx_packets")]
    writer = RecordWriter(path, fields, {})
    pieces = 10
    writer.append_many([(START_NS + n * SECOND, n * SECOND, n * pieces * 60_066, n * pieces) for n in range(2)])
    writer.close()
    facts = {key: {"nics": {"eth0": {"mtu": mtu}}} for key, mtu in (("before", before), ("after", after)) if mtu}
    (tmp_path / "nodes" / "S0" / "node.json").write_text(json.dumps(facts))
    counter = {"node": "S0", "nic": "eth0", "direction": "rx"}
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=f"{expected}.*, so its frames are not known"):
            CounterLog(path).frame_bytes(counter, stated, START_NS, START_NS + SECOND)
        return
    frames = pieces * 60_000 / (expected - 52)
    found, _ = CounterLog(path).frame_bytes(counter, stated, START_NS, START_NS + SECOND)
    assert found == pytest.approx(pieces * 60_000 + 66 * frames)
