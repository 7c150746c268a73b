"""Horovod's timelines as recorded (record_timelines.py): whole, cut off anywhere, damaged, of something else."""

import json
from pathlib import Path

import pandas as pd
import pytest

from ringtap.analysis.job.horovod_timeline import load_timeline, read_timeline
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.shares, pytest.mark.together]

GOLD = Path(__file__).resolve().parents[1] / "gold"
ALL = ["cached", "uncached", "fused", "killed"]
# The job of job.py: three layers of 64 x 64, one of 64 x 1, all with a bias, and the loss; three steps of two ranks.
GRADIENT_BYTES = 4 * (3 * (64 * 64 + 64) + 64 + 1)
STEPS = 3


def gold(name: str) -> Path:
    return GOLD / f"horovod-{name}.json"


def cut(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "timeline.json"
    path.write_bytes(data)
    return path


def gradients(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["operation"] == "ALLREDUCE") & table["tensor"].str.contains("weight|bias")]


@pytest.mark.parametrize("name", ["cached", "uncached", "fused"])
def test_every_gradient_of_every_step_is_there_with_its_bytes(name: str) -> None:
    table = gradients(read_timeline(gold(name)))
    assert set(table.groupby("tensor").size()) == {STEPS}
    assert table["bytes"].sum() == STEPS * GRADIENT_BYTES
    assert set(table["transport"]) == {"GLOO_ALLREDUCE"}


@pytest.mark.parametrize("name", ALL)
def test_times_are_in_order_and_on_the_wall_clock(name: str) -> None:
    table = read_timeline(gold(name))
    first = json.loads(gold(name).read_text().splitlines()[1].rstrip(","))
    start_ns = first["args"]["start_time_since_epoch_in_micros"] * 1000
    assert (table["negotiate_start_ns"] <= table["start_ns"]).all()
    assert (table["start_ns"] <= table["transport_start_ns"]).all()
    assert (table["transport_start_ns"] <= table["transport_end_ns"]).all()
    assert (table["transport_end_ns"] <= table["end_ns"]).all()
    assert table["end_ns"].is_monotonic_increasing
    assert (table["start_ns"] >= start_ns).all()
    assert (table["end_ns"] < start_ns + 60e9).all()
    # one tensor has one collective at a time
    by = table.sort_values("start_ns").groupby("tensor")
    assert all((rows["start_ns"].iloc[1:].to_numpy() >= rows["end_ns"].iloc[:-1].to_numpy()).all() for _, rows in by)


def test_the_rank_that_others_waited_for_is_said_at_first_sight_or_without_a_cache() -> None:
    cached, uncached = gradients(read_timeline(gold("cached"))), gradients(read_timeline(gold("uncached")))
    assert cached.groupby("tensor")["last_rank"].count().eq(1).all()
    assert uncached["last_rank"].isin([0, 1]).all()
    assert (uncached["first_ready_ns"] <= uncached["last_ready_ns"]).all()
    assert (uncached["last_ready_ns"] <= uncached["start_ns"]).all()


def test_fusion_is_told() -> None:
    assert gradients(read_timeline(gold("fused")))["fused"].all()
    assert not read_timeline(gold("cached"))["fused"].any()


def test_what_a_killed_job_left_reads_back() -> None:
    table, damaged = load_timeline(gold("killed"))
    assert len(gradients(table)) > 8
    assert damaged == 0


def test_a_file_cut_anywhere_reads_as_far_as_it_goes(tmp_path: Path) -> None:
    data = gold("fused").read_bytes()
    whole = read_timeline(gold("fused"))
    last = 0
    for end in [*range(0, 1200), *range(1200, len(data), 397), len(data)]:
        table, damaged = load_timeline(cut(tmp_path, data[:end]))
        count = len(table)
        assert count >= last
        assert damaged == 0
        pd.testing.assert_frame_equal(table, whole.head(count))
        last = count
    assert last == len(whole)


def test_a_name_with_a_quote_spoils_its_own_events_only(tmp_path: Path) -> None:
    text = gold("cached").read_text()
    tensor = gradients(read_timeline(gold("cached")))["tensor"].iloc[0]
    table, damaged = load_timeline(cut(tmp_path, text.replace(f'"{tensor}"', f'"{tensor}"x"').encode()))
    whole = read_timeline(gold("cached"))
    assert damaged > 0
    pd.testing.assert_frame_equal(table, whole[whole["tensor"] != tensor].reset_index(drop=True), check_dtype=True)


def test_sizes_come_from_type_and_shape(tmp_path: Path) -> None:
    head = [
        '{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":1000}}',
        '{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "t"}}',
    ]
    sizes = {
        '"args": {"dtype": "float64", "shape": "[2, 3]"}': 48,
        '"args": {"dtype": "float16", "shape": "[]"}': 2,
        '"args": {"dtype": "bool", "shape": "[7]"}': 7,
        '"args": {"dtype": "<unknown>", "shape": "[7]"}': None,
        '"ph": "E"': None,
    }
    for said, expected in sizes.items():
        events = ['{"ph": "B", "name": "ALLREDUCE", "ts": 5, "pid": 1}', '{"ph": "E", "ts": 9, "pid": 1, ' + said + "}"]
        table = read_timeline(cut(tmp_path, ("[\n" + ",".join(head + events) + "]").encode()))
        assert list(table["start_ns"]) == [1_005_000]
        assert list(table["end_ns"]) == [1_009_000]
        assert table["bytes"].iloc[0] == expected if expected is not None else pd.isna(table["bytes"].iloc[0])


@pytest.mark.parametrize(
    "text", ["not a trace", '[{"ph": "B", "name": "x", "ts": 1, "pid": 1}]', '{"traceEvents": []}']
)
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="is not a Horovod timeline"):
        read_timeline(cut(tmp_path, text.encode()))


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_timeline(tmp_path / "nothing.json")
