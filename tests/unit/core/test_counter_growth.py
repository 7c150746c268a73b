"""Growth of counters: every reader has one answer to a wrap, a reset and a gap."""

from collections.abc import Callable
from itertools import pairwise
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.analysis.job.counters_per_iteration import long_growth
from ringtap.analysis.live.recent_counters import Keyed, RecentWideLog
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.read_binary_records import map_records
from ringtap.analysis.runs.samples_to_iterations import Borders, counter_steps, longest_gaps_ns
from ringtap.core.append_only_logs import Field, RecordWriter, open_records
from ringtap.core.counter_growth import growth, longest_gap_ns, window_growth
from ringtap.core.counter_log_reader import CounterLog

pytestmark = pytest.mark.computes

START_NS = 1_700_000_000_000_000_000
S = 10**9
EVERY_NS = S // 10
COLUMN = "eth0.rx_bytes"
END_NS = START_NS + 10 * S

# values of a counter that grows by 1,000 in each tenth of a second, its width, and its growth in ten seconds
WRAP = ((2**32 - 3000 + 1000 * np.arange(101)) % 2**32, 32, 100_000)
RESET = (np.concatenate((10**12 + 1000 * np.arange(51), 1000 * np.arange(50))), 64, None)


def record(folder: Path, values: np.ndarray, width_bits: int, left_out: range = range(0)) -> Path:
    """Write a node's nic.rec and a log with one record per object, with the same counter; return the node's folder."""
    kind = "<u4" if width_bits == 32 else "<u8"
    node = folder / "nodes" / "a"
    times = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
    counter = Field(COLUMN, kind, "bytes", "counter", width_bits)
    packets = Field("eth0.rx_packets", kind, "packets", "counter", width_bits)
    rows = [
        (START_NS + number * EVERY_NS, number * EVERY_NS, int(value))
        for number, value in enumerate(values)
        if number not in left_out
    ]
    wide = RecordWriter(node / "nic" / "nic.rec", [*times, counter, packets], {"every_s": 0.1})
    wide.append_many([(*row, row[-1]) for row in rows])
    wide.close()
    keyed = RecordWriter(node / "keyed.rec", [*times, Field("key", "<u4", "", "index"), counter], {"every_s": 0.1})
    keyed.append_many([(t_ns, mono_ns, 7, value) for t_ns, mono_ns, value in rows])
    keyed.close()
    return node


def of_windows(node: Path) -> float | None:
    found = CounterLog(node / "nic" / "nic.rec").grown(COLUMN, START_NS, END_NS)
    return None if isinstance(found, str) else found


def of_iterations(node: Path, start_ns: int = START_NS, end_ns: int = END_NS) -> float | None:
    log = NodeLogs(node).wide("nic/nic.rec")
    assert log is not None
    found = log.growth(COLUMN, Borders(np.array([start_ns, end_ns]), np.array([0])))[0]
    return None if isnan(found) else float(found)


def of_objects(node: Path) -> float | None:
    file, records, _ = map_records(node / "keyed.rec")
    assert file is not None
    key = records["key"].astype(np.int64)
    borders = Borders(np.array([START_NS, END_NS]), np.array([0]))
    found = long_growth(file, records, key, COLUMN, np.zeros(len(key), np.int64), 1, borders)[0, 0]
    return None if isnan(found) else float(found)


def of_live_node(node: Path) -> float | None:
    file = open_records(node / "nic" / "nic.rec")
    rows = file.tail()
    log = RecentWideLog(file, rows[0])
    log.feed(rows)
    return log.total(COLUMN)


def of_live_objects(node: Path) -> float | None:
    file = open_records(node / "keyed.rec")
    log = Keyed(("key",))
    log.begin(file)
    rows = file.tail()
    log.feed(rows)
    log.commit(rows[-1][1])
    return log.total(7, COLUMN)


READERS = [of_windows, of_iterations, of_objects, of_live_node, of_live_objects]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("values", "width_bits", "wanted"), [WRAP, RESET], ids=["wrap", "reset"])
def test_all_readers_agree_on_a_wrap_and_on_a_reset(
    read: Callable[[Path], float | None], values: np.ndarray, width_bits: int, wanted: float | None, tmp_path: Path
) -> None:
    assert read(record(tmp_path, values, width_bits)) == wanted


@pytest.mark.parametrize("read", READERS)
def test_all_readers_agree_on_the_growth_over_a_gap(read: Callable[[Path], float | None], tmp_path: Path) -> None:
    values, width_bits, wanted = WRAP
    assert read(record(tmp_path, values, width_bits, left_out=range(20, 60))) == pytest.approx(wanted)


@pytest.mark.parametrize("edge_s", [3.5, 4.0])
def test_a_window_that_ends_inside_a_gap_has_no_growth(edge_s: float, tmp_path: Path) -> None:
    node = record(tmp_path, *WRAP[:2], left_out=range(20, 60))
    for start_ns, end_ns in ((START_NS, START_NS + round(edge_s * S)), (START_NS + round(edge_s * S), END_NS)):
        says = CounterLog(node / "nic" / "nic.rec").grown(COLUMN, start_ns, end_ns)
        assert says == "has a gap at an edge of the window"
        assert of_iterations(node, start_ns, end_ns) is None
    # a window that ends at a sample needs no interpolation
    assert CounterLog(node / "nic" / "nic.rec").grown(COLUMN, START_NS, START_NS + 6 * S) == 60_000
    assert of_iterations(node, START_NS, START_NS + 6 * S) == 60_000


def test_an_iteration_may_begin_between_samples_at_their_usual_distance(tmp_path: Path) -> None:
    """Of a window on its own, that would be too coarse."""
    node = record(tmp_path, 1000 * np.arange(101), 64, left_out=range(30, 31))
    for start_s, grown in ((5.05, 5_000), (2.95, 5_000), (3.05, 5_000)):
        edges_ns = START_NS + round(start_s * S), START_NS + round((start_s + 0.5) * S)
        assert of_iterations(node, *edges_ns) == pytest.approx(grown)
        assert CounterLog(node / "nic" / "nic.rec").grown(COLUMN, *edges_ns) == "has a gap at an edge of the window"


@given(lengths_ns=st.lists(st.integers(1, 10**11), min_size=1, max_size=9), period_ns=st.integers(0, 10**10))
def test_the_longest_gaps_of_columns_are_those_of_single_windows(lengths_ns: list[int], period_ns: int) -> None:
    edges_ns = np.cumsum([START_NS, *lengths_ns])
    found = longest_gaps_ns(Borders(edges_ns, np.arange(len(lengths_ns))), period_ns)
    assert found.tolist() == [longest_gap_ns(length_ns, period_ns) for length_ns in lengths_ns]


def test_only_the_iterations_around_a_reset_have_no_growth(tmp_path: Path) -> None:
    log = NodeLogs(record(tmp_path, *RESET[:2])).wide("nic/nic.rec")
    assert log is not None
    edges = START_NS + np.arange(11) * S
    found = log.growth(COLUMN, Borders(edges, np.arange(10)))
    assert np.flatnonzero(np.isnan(found)).tolist() == [5]  # from the sample at 5.0 s to that at 5.1 s
    assert np.delete(found, 5).tolist() == [10_000.0] * 9


def test_a_reset_hides_a_live_rate_only_while_it_is_recent(tmp_path: Path) -> None:
    file = open_records(record(tmp_path, *RESET[:2]) / "nic" / "nic.rec")
    rows = file.tail()
    log = RecentWideLog(file, rows[0])
    rates = []
    for number in range(0, 100, 10):
        log.feed(rows[number : number + 10])
        rates.append(log.rate(COLUMN))
    assert rates[5] is None
    assert rates[4] == rates[-1] == pytest.approx(10_000)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=20),
    width_bits=st.sampled_from([0, 4, 8, 16, 24, 32, 44, 48, 56, 63, 64]),
)
def test_the_rule_for_columns_is_that_for_single_values(pairs: list[tuple[int, int]], width_bits: int) -> None:
    largest = 1 << (width_bits or 64)
    pairs = [(before % largest, after % largest) for before, after in pairs]
    before, after = (np.array(side, np.uint64) for side in zip(*pairs, strict=True))
    steps = counter_steps(before, after, width_bits)
    for (one, other), step in zip(pairs, steps, strict=True):
        wanted = growth(one, other, width_bits)
        assert isnan(step) if wanted is None else step == float(wanted)


@given(
    gaps_ms=st.lists(st.integers(1, 50), min_size=30, max_size=60),
    steps=st.lists(st.integers(0, 2**31), min_size=60, max_size=60),
    start=st.floats(0, 0.4),
    end=st.floats(0.6, 1),
)
def test_windows_that_meet_add_up(gaps_ms: list[int], steps: list[int], start: float, end: float) -> None:
    times = [START_NS, *(START_NS + int(at) * 10**6 for at in np.cumsum(gaps_ms))]
    values = [0, *(int(value) % 2**32 for value in np.cumsum(steps[: len(gaps_ms)]))]
    length_ns = times[-1] - START_NS
    start_ns, middle_ns, end_ns = (START_NS + round(share * length_ns) for share in (start, 0.5, end))
    parts = [window_growth(times, values, *one, 32) for one in ((start_ns, middle_ns), (middle_ns, end_ns))]
    whole = window_growth(times, values, start_ns, end_ns, 32)
    if not any(isinstance(found, str) for found in (*parts, whole)):
        assert sum(parts) == pytest.approx(whole, rel=1e-9, abs=1e-3)  # of floats


def test_a_saturating_counter_that_fell_was_reset(tmp_path: Path) -> None:
    """It never wraps, whatever its width: it stays at its largest value until somebody clears it."""
    node = tmp_path / "nodes" / "a"
    times = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
    writer = RecordWriter(node / "infiniband" / "a.rec", [*times, Field("n", "<u8", "packets", "saturating", 32)], {})
    writer.append_many([(START_NS + number * S, number * S, value) for number, value in enumerate((5, 9, 2, 4))])
    writer.close()
    log = NodeLogs(node).wide("infiniband/a.rec")
    assert log is not None
    assert log.steps("n").tolist() == pytest.approx([4, np.nan, 2], nan_ok=True)
    rows = log.file.tail()
    assert [log.file.grown("n", *pair) for pair in pairwise(rows)] == [4, None, 2]
