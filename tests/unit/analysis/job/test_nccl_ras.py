"""What NCCL's RAS service said of the ranks, as the summary of a run repeats it."""

from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.job.nccl_ras import read_ras, state_text
from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.job.summary_text import describe
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.core.append_only_logs import JsonLinesWriter
from ringtap.core.run_directory import load_json, write_json
from tests.gold.job_run import START_NS, Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.together]


def line(at_s: int, rank: int, state: str, **more: int) -> dict[str, Any]:
    item = {"t_ns": START_NS + at_s * 10**9, "communicator": "0xae", "size": 4, "rank": rank, "host": "10.0.0.4"}
    return item | {"pid": 70 + rank, "state": state} | more


def write(folder: Path, lines: list[dict[str, Any]], answers: int = 3) -> None:
    log = JsonLinesWriter(folder / "nccl-ras/ranks.jsonl")
    for one in lines:
        log.append(one)
    log.close()
    info = load_json(folder / "node.json", dict) if (folder / "node.json").exists() else {}
    entry = {"state": "ok", "reason": "", "remedy": "", "answers": answers}
    write_json(folder / "node.json", info | {"collectors": info.get("collectors", {}) | {"nccl-ras": entry}})


def test_the_last_state_of_each_rank_is_kept_with_its_end(tmp_path: Path) -> None:
    behind = line(10, 1, "behind", operations=9, most_operations=10)
    write(
        tmp_path,
        [behind, line(30, 1, "answers"), line(40, 3, "unresponsive"), line(50, 3, "dead"), line(60, 0, "missing")],
    )
    found = read_ras(NodeLogs(tmp_path))
    assert [(one["rank"], one["state"]) for one in found] == [(1, "behind"), (3, "dead")]
    assert [state_text(one, START_NS) for one in found] == [
        "RAS: rank 1 of 4 (process 71 on 10.0.0.4) had launched 9 collectives, another one 10, from 10 s to 30 s.",
        "RAS: rank 3 of 4 (process 73 on 10.0.0.4) was dead from 50 s on.",
    ]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([], "RAS: all ranks answered, and none stayed behind, in 3 answers."),
        ([line(1, 2, "failed")], "RAS: rank 2 of 4 (process 72 on 10.0.0.4) had failed from "),
        ([line(1, rank, "unresponsive") for rank in range(10)], "RAS: 2 more (--json has all)."),
    ],
)
def test_the_text_of_a_run_says_it(tmp_path: Path, lines: list[dict[str, Any]], text: str) -> None:
    write_ddp_job(tmp_path / "job", Truth(iterations=5), sockets=False)
    write(tmp_path / "job/nodes/n0", lines)
    assert text in "\n".join(describe(summarize(open_job(tmp_path / "job"))))


def test_a_run_without_answers_says_nothing_of_it(tmp_path: Path) -> None:
    write_ddp_job(tmp_path / "job", Truth(iterations=5), sockets=False)
    assert "RAS" not in "\n".join(describe(summarize(open_job(tmp_path / "job"))))
