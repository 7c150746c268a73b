"""The example of sharded, pipeline and tensor parallelism trains on two ranks as on one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.frameworks.ranks import WarmInterpreter, free_port

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

SMALL = ["--layers", "2", "--width", "24", "--batch", "8", "--microbatches", "2", "--iterations", "10"]
MISFITS: list[tuple[list[str], int, str]] = [
    (["--kind", "fsdp", "--batch", "9"], 2, "--batch: 9 cannot be cut into 2 equal parts"),
    (["--kind", "pipeline", "--layers", "3"], 2, "--layers: 3 cannot be cut into 2 equal parts"),
    (["--kind", "pipeline", "--microbatches", "2"], 4, "--microbatches 2 is below the 4 ranks of the pipeline"),
    (["--kind", "tensor"], 4, ""),
]
JOB = f"""
import json, os, sys
from ringtap.examples.parallelism import KINDS, main, misfit, parse_arguments
for alone in (False, True) if os.environ["RANK"] == "0" else (False,):
    if alone:
        del os.environ["RANK"]
    for kind, port in zip(KINDS, sys.argv[1:]):  # a port of its own: the other rank may still hold the one before
        os.environ["MASTER_PORT"] = port
        main(["--kind", kind, *{SMALL!r}])
print(json.dumps([misfit(parse_arguments(words), ranks) for words, ranks, _ in {MISFITS!r}]))
"""


def test_two_ranks_train_as_one(tmp_path: Path, warm: WarmInterpreter) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    ports = [str(free_port()) for _ in range(3)]
    first, _ = warm.run([str(script), *ports], tmp_path / "job", os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, 2)
    assert re.findall(r"^(\w+): (\d) ranks, 9552 parameters", first, re.MULTILINE) == [
        (kind, ranks) for ranks in "21" for kind in ("fsdp", "pipeline", "tensor")
    ]
    losses = [float(found) for found in re.findall(r"^Iteration 10: loss (\S+),", first, re.MULTILINE)]
    # float32 sums in another order, ten steps on
    assert losses == pytest.approx([losses[3]] * 6, rel=1e-5)
    assert json.loads(first.splitlines()[-1]) == [says for _, _, says in MISFITS]
