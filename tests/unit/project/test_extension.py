"""What one new file and its registration add, as docs/project/architecture.md says: each is made, and used."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.flow_plan_format import Flow
from tests.gold.analysis_sweep import write_sweep

pytestmark = pytest.mark.shares

ROOT = Path(__file__).resolve().parents[3]
COLLECTOR = '''
"""The number of entries in /proc."""

import time
from pathlib import Path
from typing import Any

from ringtap.collectors.collector_interface import Check, Context
from ringtap.core.append_only_logs import Field, RecordWriter

_TIMES = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]


class MineCollector:
    """Recorder of ``mine/mine.rec``."""

    name, slow = "mine", False

    def __init__(self, context: Context) -> None:
        self.every_s, self._path, self._most = context.every_s, context.folder / "mine" / "mine.rec", 0

    def check(self) -> Check:
        return Check("ok", "/proc is there")

    def start(self) -> None:
        about = {"collector": "mine", "source": "/proc", "every_s": self.every_s}
        self._log = RecordWriter(self._path, [*_TIMES, Field("entries", "<i8", "", "gauge")], about)
        self.sample()

    def sample(self) -> None:
        entries = len(list(Path("/proc").iterdir()))
        self._log.append(time.time_ns(), time.monotonic_ns(), entries)
        self._most = max(self._most, entries)

    def stop(self) -> dict[str, Any]:
        self.sample()
        self._log.close()
        return {"most": self._most}
'''
# a job that ends when six samples of it have been taken
SAMPLED = """
import time
from pathlib import Path
from ringtap.core.append_only_logs import open_records

def count():
    return sum(open_records(path).count for path in Path("run").glob("nodes/*/mine/mine.rec") if path.stat().st_size)

until_s = time.monotonic() + 60
while count() < 6 and time.monotonic() < until_s:
    time.sleep(0.02)
"""
KIND = '''
"""Flows of one size at fixed intervals."""

from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen.plans.kind import DURATION, TO, Option, TrafficKind, duration_ns


class MinePlan:
    def __init__(self, frame, every_ns):
        frame.check()
        self._frame, self._starts = frame, range(0, frame.duration_ns, every_ns)
        self.header = frame.header("mine", len(self._starts), 1000 * len(self._starts), every_ns=every_ns)

    def flows(self):
        for start_ns in self._starts:
            yield Flow(start_ns, "", self._frame.destinations[0], 1000)


EVERY = Option("every", "TIME", "mine: from flow to flow", duration_ns)
MINE = TrafficKind("mine", lambda given, frame: MinePlan(frame, given["every"]), (DURATION, EVERY), (TO,))
'''
VERB = '''
"""A greeting."""


def register(subparsers, name, summary):
    parser = subparsers.add_parser(name, help=summary, description=summary)
    parser.add_argument("--whom", default="you")
    parser.set_defaults(handler=lambda options: print("Hello,", options.whom) or 0)
'''
FIGURE = '''
"""The number of points of each series."""

import pandas as pd

from ringtap.analysis.plots.figure import sheet


def mine(series, tails, setting):
    on = sheet(1, 1, (3, 2))
    on.panels[0].bar([str(one.key) for one in series], [len(one.used) for one in series])
    return on.drawn("mine", "A caption of mine.", pd.DataFrame({"points": [len(one.used) for one in series]}))
'''


class Copy:
    """A copy of the packages that can be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("agents", "analysis", "collectors", "examples", "ringtap", "slurm", "trafficgen", "workload"):
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / "code" / name, symlinks=True, ignore=ignore)

    def add(self, path: str, text: str, registry: str, after: str, line: str) -> None:
        """Write a new file, and one line below another in a registry."""
        (self.folder / "code" / path).write_text(text)
        self.register(registry, after, line)

    def register(self, registry: str, after: str, line: str) -> None:
        """Write one line below another in a registry."""
        file = self.folder / "code" / registry
        before = file.read_text().splitlines(keepends=True)
        place = before.index(f"{after}\n") + 1
        file.write_text("".join([*before[:place], f"{line}\n", *before[place:]]))

    def ringtap(self, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"PYTHONPATH": str(self.folder / "code"), "COLUMNS": "120"}
        command = [sys.executable, "-m", "ringtap", *words]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=60
        )


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_a_collector_is_a_file_and_a_line(copy: Copy) -> None:
    entry = '    "mine": ("ringtap.collectors.mine", "MineCollector"),'
    copy.add("collectors/mine.py", COLLECTOR, "collectors/registry.py", "_CLASSES = {", entry)
    job = [sys.executable, "-c", SAMPLED]
    done = copy.ringtap("run", "--collect", "mine", "--every", "50ms", "-o", "run", "--", *job)
    assert done.returncode == 0, done.stderr
    (node,) = (copy.folder / "run" / "nodes").iterdir()
    said = json.loads((node / "node.json").read_text())["collectors"]["mine"]
    log = open_records(node / "mine" / "mine.rec")
    assert log.count > 5
    most = max(entries for _, _, entries in log.walk())
    assert most > 0
    assert (said["state"], said["reason"], said["most"]) == ("ok", "/proc is there", most)
    assert "mine" in copy.ringtap("doctor").stdout
    assert "the collectors are mine, nic" in copy.ringtap("run", "--collect", "yours", "--", "true").stderr


def test_a_kind_of_traffic_is_a_file_and_a_line(copy: Copy) -> None:
    entry = '    ("ringtap.trafficgen.plans.mine", "MINE"),'
    copy.add("trafficgen/plans/mine.py", KIND, "trafficgen/plans/registry.py", "_KINDS = (", entry)
    words = ["traffic", "plan", "--kind", "mine", "--duration", "50ms", "--to", "127.0.0.1:5001", "-o", "mine.plan"]
    done = copy.ringtap(*words)
    assert (done.returncode, done.stderr) == (2, "ringtap: --kind mine needs --every\n")
    done = copy.ringtap(*words, "--every", "20ms")
    assert done.returncode == 0, done.stderr
    plan = PlanFile(copy.folder / "mine.plan")
    assert (plan.header["kind"], plan.header["every_ns"], len(list(plan.flows()))) == ("mine", 20_000_000, 3)
    assert list(plan.flows()) == [Flow(start, "", "127.0.0.1:5001", 1000) for start in (0, 20_000_000, 40_000_000)]
    refused = copy.ringtap("traffic", "plan", "--kind", "ring", "--every", "20ms", "--summary")
    assert refused.stderr == "ringtap: --kind ring does not take --every\n"
    assert "--every TIME" in copy.ringtap("traffic", "plan", "--help").stdout


def test_a_verb_is_a_file_and_a_line(copy: Copy) -> None:
    entry = '        "mine": ("ringtap.mine", "greet somebody"),'
    copy.add("ringtap/mine.py", VERB, "ringtap/cli.py", '    "Other": {', entry)
    done = copy.ringtap("mine", "--whom", "world")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello, world\n", "")
    assert "greet somebody" in copy.ringtap("--help").stdout


def test_a_figure_is_a_file_an_import_and_a_line(copy: Copy) -> None:
    registry = "analysis/report/sweep_page.py"
    copy.add("analysis/plots/mine.py", FIGURE, registry, "FIGURES: dict[str, Maker] = {", '    "mine": mine,')
    copy.register(
        registry,
        "from ringtap.analysis.plots.figure import Drawn",
        "from ringtap.analysis.plots.mine import mine",
    )
    write_sweep(copy.folder / "sweep", [("vgg16", "consistent")])
    done = copy.ringtap("report", "sweep")
    assert done.returncode == 0, done.stderr
    report = copy.folder / "sweep" / "report"
    assert (report / "figures" / "mine.csv").read_text() == "points\n6\n"
    assert (report / "report.html").read_text().count("A caption of mine.") >= 1


def test_a_model_is_a_line(copy: Copy) -> None:
    copy.register(
        "ringtap/core/thesis_neural_networks.py",
        "    for profile in (",
        '        ModelProfile("mine", "Mine", lambda: [TensorShape("weight", (1000, 1000), 1_000_000)], 0.1),',
    )
    (copy.folder / "plan.toml").write_text(
        '[sweep]\nloads = [0, 0.5]\ntraffic = ["iperf"]\n[[models]]\nname = "mine"\n'
    )
    done = copy.ringtap("sweep", "plan.toml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "mine-iperf" in done.stdout
