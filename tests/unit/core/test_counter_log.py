import numpy as np
import pytest

from ringtap.core.counter_log import CounterLog
from ringtap.core.records import Field, RecordWriter

pytestmark = [pytest.mark.computes, pytest.mark.together]

START_NS = 1_700_000_000_000_000_000
SECOND = 10**9


def log(path, values, width_bits=64, every_ns=SECOND // 10):
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
    found = log(tmp_path / "a.rec", 1000 * np.arange(101) + 2**53)  # beyond what a float holds exactly
    assert found.grown("t_ns", START_NS, START_NS + SECOND) == "was not recorded"
    assert found.grown("a", START_NS + 2 * SECOND, START_NS + 8 * SECOND) == 60_000
    # edges within a tenth of a second
    assert found.grown("a", START_NS + SECOND + 25_000_000, START_NS + 9 * SECOND - 50_000_000) == pytest.approx(79_250)
    assert found.grown("a", START_NS, START_NS + 10 * SECOND) == 100_000


def test_narrow_counters_wrap(tmp_path):
    values = (2**32 - 3000 + 1000 * np.arange(101)) % 2**32
    assert log(tmp_path / "a.rec", values, 32).grown("a", START_NS + SECOND, START_NS + 9 * SECOND) == 80_000


@pytest.mark.parametrize(
    ("start_s", "end_s", "says"),
    [(-1, 5, "does not cover"), (1, 11, "does not cover"), (4.5, 5.5, "was reset")],
)
def test_what_is_wrong_is_said(tmp_path, start_s, end_s, says):
    values = 1000 * np.arange(101)
    values[50] = 0
    found = log(tmp_path / "a.rec", values).grown("a", START_NS + int(start_s * SECOND), START_NS + int(end_s * SECOND))
    assert says in found


def test_an_empty_log_has_no_counters(tmp_path):
    assert log(tmp_path / "a.rec", []).grown("a", START_NS, START_NS + 1) == "was not recorded"
    assert log(tmp_path / "b.rec", [1]).grown("a", START_NS, START_NS + 1) == "does not cover the window"
