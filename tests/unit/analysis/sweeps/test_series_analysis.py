"""The numbers of a sweep's series."""

import json
from pathlib import Path

import pytest

from ringtap.analysis.sweeps.sweep import open_sweep
from tests.gold.analysis_sweep import WORKERS, edit_info, write_sweep

pytestmark = pytest.mark.computes


def test_workers_of_the_equation_are_the_ranks_on_all_hosts(tmp_path: Path) -> None:
    path = tmp_path / "sweep"
    write_sweep(path, [("vgg16", "iperf")], loads_gbps=(0,))
    assert [series.demand.workers for series in open_sweep(path)] == [len(WORKERS)]

    plan = json.loads((path / "run.json").read_text())["plan"]
    plan["topology"] |= {"reach": "ssh", "machines": [{"name": name, "ranks": 4} for name in (*WORKERS, "S2")]}
    edit_info(path, plan=plan)
    (series,) = open_sweep(path)
    assert series.demand.workers == 4 * len(WORKERS)
