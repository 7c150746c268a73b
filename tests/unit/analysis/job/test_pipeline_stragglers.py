"""What stragglers cost, from tables of operations whose times were added up by hand."""

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ringtap.analysis.job.pipeline_stragglers import describe, read_pipeline, stragglers
from ringtap.cli import main
from ringtap.core.errors import UsageError

pytestmark = pytest.mark.computes

# one micro-batch in two stages: passes of 1 s and 2 s, messages, the norm of the gradients and the optimizer of 0.1 s
FIRST = [
    ("forward-compute", 0.0, 1.0), ("forward-send", 1.0, 1.1), ("backward-recv", 1.1, 4.2),
    ("backward-compute", 4.2, 6.2), ("optimizer-clip-main-grad", 6.2, 6.3), ("optimizer", 6.3, 6.4),
]  # fmt: skip
SECOND = [
    ("forward-recv", 0.0, 1.1), ("forward-compute", 1.1, 2.1), ("backward-compute", 2.1, 4.1),
    ("backward-send", 4.1, 4.2), ("optimizer-clip-main-grad", 4.1, 6.3), ("optimizer", 6.3, 6.4),
]  # fmt: skip
LATE_S = 2.0
TIMES = ("start_ts", "duration")


def table(late: int | None = None, steps: int = 2) -> pd.DataFrame:
    """Two data-parallel ranks of two stages; the first forward pass of one of them takes two seconds longer."""
    rows = []
    for step in range(steps):
        for dp_rank in (0, 1):
            for stage, operations in enumerate((FIRST, SECOND)):
                for kind, begin, end in operations:
                    is_last = kind.startswith("optimizer")
                    longer = LATE_S if late is not None and (dp_rank == late or is_last) else 0
                    # the norm is of all ranks, so that those in time begin it early
                    is_early = begin == 0 or (kind == "optimizer-clip-main-grad" and dp_rank != late)
                    begin_s = begin if is_early else begin + longer
                    rows.append(
                        {"rank": 2 * dp_rank + stage, "dp_rank": dp_rank, "stage": stage, "step": step, "optype": kind,
                         "seq_id": 0, "mc": 0, "start_ts": begin_s, "duration": end + longer - begin_s}
                    )  # fmt: skip
    return pd.DataFrame(rows)


def answers(path: Path, operations: pd.DataFrame) -> dict[str, Any]:
    operations.to_parquet(path / "operations.parquet")
    return stragglers(read_pipeline(path / "operations.parquet"))


def test_job_without_stragglers_loses_nothing(tmp_path: Path) -> None:
    found = answers(tmp_path, table())
    assert found["step_s"] == pytest.approx(6.4)
    assert found["recorded_step_s"] == pytest.approx(6.4)
    assert found["slowdown"] == pytest.approx(1)
    assert (found["ranks"], found["stages"], found["dp_ranks"], found["steps"]) == (4, 2, 2, 2)


def test_slow_worker_is_named_with_what_it_costs(tmp_path: Path) -> None:
    found = answers(tmp_path, table(late=1))
    assert found["step_s"] == found["recorded_step_s"] == pytest.approx(8.4)
    # a forward pass takes 1.5 s on average
    assert found["ideal_step_s"] == pytest.approx(7.4)
    assert found["slowdown"] == pytest.approx(8.4 / 7.4)
    assert found["by_stage"][0] == pytest.approx(8.9 / 7.4)
    assert found["by_dp_rank"] == {0: pytest.approx(7.4 / 7.4), 1: pytest.approx(8.4 / 7.4)}
    assert found["workers"][0] == {"rank": 2, "stage": 0, "dp_rank": 1, "slowdown": pytest.approx(8.4 / 7.4)}
    # without its forward pass of 3 s, a step takes 6.9 s
    assert found["slowest"] == {"ranks": [2], "share": pytest.approx(1.5)}


def test_row_order_and_types_of_the_table_do_not_matter(tmp_path: Path) -> None:
    mixed = table(late=1).sample(frac=1, random_state=1).astype({"optype": "category", "rank": "int16", "mc": "int8"})
    assert answers(tmp_path, mixed)["slowdown"] == pytest.approx(8.4 / 7.4)


def test_analyze_prints_the_answer_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "operations.parquet"
    table(late=1).to_parquet(path)
    assert main(["analyze", str(path)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == (
        "Stragglers make a step 1.135 times as long: 8.4 s, and 7.4 s if each operation took as long as its kind "
        "usually does."
    )
    assert lines[0].startswith("Slowest worker: rank 2 (stage 0, data-parallel rank 1).")
    assert main(["analyze", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by_dp_rank"]["1"] == pytest.approx(8.4 / 7.4)
    assert main(["analyze", str(path), "--phase", "1"]) == 2
    assert "--phase is of runs" in capsys.readouterr().err


def test_tables_of_a_run_are_not_read_as_operations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    table().to_parquet(tmp_path / "iterations.parquet")
    assert main(["analyze", str(tmp_path / "iterations.parquet")]) == 2
    assert f"it has no run.json; {tmp_path} is one" in capsys.readouterr().err


def test_lost_time_that_is_not_there_has_no_shares(tmp_path: Path) -> None:
    found = answers(tmp_path, table()) | {"slowest": {"ranks": [0], "share": None}}
    assert "nothing changes, as no time is lost" in describe(found)[1]


def without(operations: pd.DataFrame, kind: str) -> pd.DataFrame:
    return operations[~((operations["optype"] == kind) & (operations["step"] == 1) & (operations["dp_rank"] == 1))]


def with_backward_pass_first(operations: pd.DataFrame) -> pd.DataFrame:
    is_forward = (operations["optype"] == "forward-compute") & (operations["stage"] == 0)
    return operations.assign(start_ts=operations["start_ts"].mask(is_forward, 5.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda every: every.drop(columns="seq_id"), "no column 'seq_id'"),
        (lambda every: every[:0], "0 operations"),
        (lambda every: every.replace({"optype": {"optimizer": "tea"}}), "'tea', of which it is not known"),
        (lambda every: every.assign(mc=1), "several chunks"),
        (lambda every: every.assign(duration=float("nan")), "without a time"),
        (lambda every: every.assign(rank=every["rank"] + 4 * every["step"]), "several ranks"),
        (lambda every: without(every, "backward-recv"), "backward-recv 0 of stage 0 3 times in 2 steps of 2 data"),
        (lambda every: every[every["optype"] != "backward-send"], "0 backward-send for 1 backward-compute of stage 1"),
        (lambda every: every[every["optype"] != "forward-compute"], "no forward or no backward pass of stage 0"),
        (lambda every: every[every["stage"] == 1], "no forward or no backward pass of stage 0"),
        (lambda every: every.assign(stage=every["stage"] - 1), "from 0 on in its column 'stage'"),
        (lambda every: every.assign(step="one"), "from 0 on in its column 'step'"),
        (lambda every: every.assign(mc="0"), "several chunks"),
        (lambda every: every.assign(seq_id=[0, *every["seq_id"].tolist()[1:-1], None]), "in its column 'seq_id'"),
        (lambda every: every.assign(start_ts="now"), "without a time"),
        (lambda every: every.assign(duration=every["duration"] > 1), "without a time"),
        (lambda every: every.assign(duration=-1.0), "without a time"),
        (lambda every: pd.concat([every, every]), "8 times in 2 steps"),
        (with_backward_pass_first, "wait for each other"),
    ],
)
def test_tables_that_do_not_say_enough_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "operations.parquet"
    change(table()).to_parquet(path)
    with pytest.raises(UsageError, match=words):
        read_pipeline(path)


def test_operations_without_length_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="take no time"):
        answers(tmp_path, table().assign(duration=0.0))


def test_chunks_may_be_null_and_columns_an_index(tmp_path: Path) -> None:
    nulls = table(late=1).assign(mc=pd.array([None, *[0] * (len(table()) - 1)], dtype="Int64"))
    assert answers(tmp_path, nulls.set_index(["rank", "step"]))["slowdown"] == pytest.approx(8.4 / 7.4)


def test_times_may_be_whole_numbers(tmp_path: Path) -> None:
    whole = table(late=1).assign(**{name: (table(late=1)[name] * 10).round().astype("uint64") for name in TIMES})
    assert answers(tmp_path, whole)["slowdown"] == pytest.approx(8.4 / 7.4)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "operations.parquet"
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_pipeline(path)
    os.mkfifo(path)
    with pytest.raises(UsageError, match="is not a regular file"):
        read_pipeline(path)
    path.unlink()
    path.write_text("no table")
    with pytest.raises(UsageError, match="is not a Parquet file"):
        read_pipeline(path)
