"""The benchmark of injected faults draws jobs of every kind, and judges what is said of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.computes, pytest.mark.together]

FOLDER = Path(__file__).resolve().parents[4] / "benchmarks"
CODE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import diagnosis
jobs = [list(diagnosis.jobs_of(seed)) for seed in range(20)]
same = list(diagnosis.jobs_of(3)) == jobs[3]
cause = {"name": "slow rank", "share": 0.2, "low_s": 0.01, "seconds": 0.02, "rank": 1, "iterations": 35}
healthy = jobs[0][0] | {"times": "ddp"}
item = healthy | {"fault": {"kind": "slow rank", "rank": 1}, "affected": (25, 60)}
seconds = [0.12 if 25 <= number + 1 < 60 else 0.1 for number in range(79)]
found = {"why": "", "causes": [cause, cause | {"rank": 2}, cause | {"share": 0.01}], "unknown": []}
rows = [diagnosis.judged(item, seconds, None, {}, found)]
rows[0] |= {"is_within": [True, False], "widths": [1.0, 3.0]}
rows.append(diagnosis.judged(item, seconds, None, {}, found | {"causes": []}))
rows.append(diagnosis.judged(healthy, [0.1] * 79, 0.1, {}, found))
slower = found | {"causes": [cause | {"name": "slower iterations", "rank": None}]}
untimed = [diagnosis.judged(item | {"times": times}, seconds, None, {}, slower)["right"] for times in ("ddp", "none")]
both = item | {"fault": {"kind": "two at once", "rank": 1}}
alone_s = {"slow rank": 0.001, "other traffic": 0.007}
pair = diagnosis.judged(both, seconds, None, alone_s, found)["faults"]
stalls = [{"kind": "stalls", "every": 9}, {"kind": "loss"}]
pauses = [{"kind": "pauses", "rank": 2, "often": often} for often in (0.3, 0.0)]
first = [diagnosis.first_with(item | {"fault": fault}) for fault in stalls + pauses]
in_messages = item | {"model": "messages", "fault": {"kind": "loss", "host": "S1"}}
wandering = diagnosis.judged(in_messages, [0.1 + 0.01 * (number // 9 % 2) for number in range(79)], None, {}, found)
more = {"wandering": wandering, "pair": pair, "first": first}
print(json.dumps(more | {"jobs": jobs, "same": same, "rows": rows, "untimed": untimed, "table": diagnosis.table(rows)}))
"""


def test_jobs_are_drawn_by_seed_and_verdicts_are_judged() -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(FOLDER)], capture_output=True, text=True, check=True)
    data = json.loads(done.stdout)
    assert data["same"]
    for seed, jobs in enumerate(data["jobs"]):
        kinds = [job["fault"]["kind"] for job in jobs]
        assert kinds.count("healthy") >= len(kinds) / 3
        assert {"slow rank", "stalls", "pauses", "slow link", "loss", "other traffic", "two at once"} < set(kinds)
        assert kinds[-4:] == ["busy node", "checkpoints", "slow within", "slower of two"]
        alone = [job for job in jobs if job["fault"]["kind"] in ("slow rank", "other traffic", "two at once")]
        assert len({(job["model"], tuple(job["affected"])) for job in alone}) == 1
        assert alone[2]["fault"] == alone[0]["fault"] | alone[1]["fault"] | {"kind": "two at once"}
        assert ("small buffers" if seed % 2 else "congestion control") in kinds
    right, missed, healthy = data["rows"]
    assert (right["right"], right["wrong"]) == (["slow rank"], ["slow rank"])
    # 35 of 76 iterations after warm-up take 20 ms longer
    assert right["cost_s"] == pytest.approx(0.02 * 35 / 76)
    assert (missed["right"], missed["wrong"]) == ([], [])
    assert (healthy["cost_s"], healthy["right"], healthy["wrong"]) == (0, [], ["slow rank", "slow rank"])
    cost_s, mean_s = right["cost_s"], right["mean_s"]
    # what it takes longer with both than with the other one alone
    assert data["pair"] == [
        pytest.approx([cost_s - 0.007, (cost_s - 0.007) / mean_s, 0.02]),
        pytest.approx([cost_s - 0.001, (cost_s - 0.001) / mean_s, 0.0]),
    ]
    assert data["first"][:2] == [27, 25]
    assert 25 < data["first"][2] < 60 == data["first"][3]
    assert data["untimed"] == [[], ["slower iterations"]]
    lines = data["table"].splitlines()
    assert "| slow rank | 2 | - | 1 of 2 | 0 | 0 | 1 | 117% | 1 of 2 | 2.0 |" in lines
    assert "| healthy | 1 | - | - | 0 | 0 | 1 | - | - | - |" in lines
    assert not data["wandering"]["is_known"]
