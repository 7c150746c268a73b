"""Collectors, traffic and sites of installed packages: the example of docs/reference/plug-ins.md, and broken ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ringtap
from ringtap.collectors.collector_interface import Context, SampledCollector
from ringtap.collectors.registry import collector_class
from ringtap.core.append_only_logs import open_records
from tests.unit.agent_processes import wait_for

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reference" / "plug-ins.md").read_text()
HAS_PRESSURE = Path("/proc/pressure/cpu").exists()
# begins when $LOGS collectors record, 1 by default
JOB = """
import glob, os, time, ringtap
end_s = time.monotonic() + 40
while time.monotonic() < end_s and len(glob.glob(os.environ["RINGTAP_RUN"] + "/nodes/*/*/*.rec")) < int(
    os.environ.get("LOGS", 1)
):
    time.sleep(0.02)
for _ in range(20):
    time.sleep(0.1)
    ringtap.step()
"""
TRAFFIC = """
from pathlib import Path

from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen.plans.kind import DURATION, TO, TrafficKind


class OneFlow:
    def __init__(self, frame):
        frame.check()
        self._frame = frame
        self.header = frame.header("one", 1, 1000)

    def flows(self):
        yield Flow(0, "", self._frame.destinations[0], 1000)


ONE = TrafficKind("one", lambda given, frame: OneFlow(frame), (DURATION,), (TO,))
HERE = Path(__file__).with_name("here.toml")
"""


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def source(pressure: str) -> str:
    """The page's collector; where the kernel has no pressure, of a file of the same form that this test makes."""
    return pressure if HAS_PRESSURE else pressure.replace('"/proc/pressure"', 'Path(__file__).parent / "pressure-of"')


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A folder with the page's package, and another with traffic and a site, installed into ``site``."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "pressure.py").write_text(source(block("python")))
    (folder / "pyproject.toml").write_text(block("text"))
    other = folder / "other"
    other.mkdir()
    (other / "mine.py").write_text(TRAFFIC)
    points = '[project.entry-points."ringtap.traffic"]\none = "mine:ONE"\nbroken = "nothing:NONE"\n'
    points += '[project.entry-points."ringtap.sites"]\nhere = "mine:HERE"\n'
    modules = '[tool.setuptools]\npy-modules = ["mine"]\n'
    (other / "pyproject.toml").write_text(f'[project]\nname = "mine"\nversion = "1.0"\n{points}{modules}')
    for path in (folder, other):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
        command += ["--target", str(folder / "site"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (folder / "site" / "here.toml").write_text('about = "A cluster of ours"\n')
    for what in ("cpu", "io", "memory"):
        (folder / "site" / "pressure-of").mkdir(exist_ok=True)
        (folder / "site" / "pressure-of" / what).write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=123\n")
    return folder


def run(folder: Path, *words: str, path: Path | None = None, logs: int = 1) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"PYTHONPATH": f"{path or ''}{os.pathsep}{ROOT}", "LOGS": str(logs)}
    command = [sys.executable, "-m", "ringtap.cli", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_collector_of_the_page_has_twelve_lines():
    lines = [line for line in block("python").splitlines() if line.strip()]
    assert len(lines) <= 12


def test_an_installed_collector_is_shown_recorded_tabulated_and_joined(package, tmp_path):
    site = package / "site"
    found = json.loads(run(tmp_path, "doctor", "--json", path=site).stdout)
    (check,) = [check for check in found["checks"] if check["name"] == "pressure"]
    assert (check["group"], check["state"]) == ("collectors", "ok")
    assert check["reason"].startswith("Pressure stall information")
    (tmp_path / "job.py").write_text(JOB)
    words = ["run", "--collect", "steps,nic,pressure", "--every", "25ms,pressure=20ms", "-o", "run", "--"]
    done = run(tmp_path, *words, sys.executable, "job.py", path=site, logs=2)
    assert done.returncode == 0, done.stderr
    job = ringtap.open_job(tmp_path / "run")
    state = job.collectors.set_index("collector").loc["pressure"]
    assert (state["state"], state["reason"]) == ("ok", check["reason"])
    samples = job.table("pressure")
    periods = (samples["t_ns"].iloc[-1] - samples["t_ns"].iloc[0]) / 20e6
    assert 10 <= len(samples) <= periods + 3, "a busy machine misses samples; the first and the last come beside these"
    assert list(samples) == ["node", "t_ns", "cpu_stalled_us", "io_stalled_us", "memory_stalled_us"]
    assert samples.attrs["units"]["cpu_stalled_us"] == "us"
    assert samples["t_ns"].is_monotonic_increasing
    by_iteration = job.table("pressure", by="iteration")
    joined = by_iteration.merge(job.iterations, on="iteration")
    assert len(joined) == len(job.iterations) == 19
    assert set(by_iteration.attrs["columns"]) == set(by_iteration.columns)
    grown = samples["cpu_stalled_us"].iloc[-1] - samples["cpu_stalled_us"].iloc[0]
    assert 0 <= by_iteration["cpu_stalled_us"].sum() <= grown + 0.5, "the parts are floating-point numbers"
    nic = job.table("nic", by="iteration").merge(job.iterations, on="iteration")
    t_ns = job.table("nic")["t_ns"].to_numpy()
    covered = (nic["start_ns"] >= t_ns[0]) & (nic["end_ns"] <= t_ns[-1])
    longest_ns = np.maximum(0.05 * (nic["end_ns"] - nic["start_ns"]), 2.5 * np.median(np.diff(t_ns)))
    for side in ("start_ns", "end_ns"):  # a busy machine misses samples
        after = np.clip(np.searchsorted(t_ns, nic[side]), 1, len(t_ns) - 1)
        covered &= t_ns[after] - t_ns[after - 1] <= longest_ns
    assert (nic["lo.rx_bytes"].notna() == covered).all(), "an iteration is known where samples cover it"
    assert covered.sum() >= 10
    with pytest.raises(ringtap.UsageError, match="did you mean 'pressure'"):
        job.table("presure")
    with pytest.raises(ringtap.UsageError, match="did you mean 'iteration'"):
        job.table("nic", by="iterations")


def test_a_collector_of_a_module_needs_no_package(package, tmp_path):
    (tmp_path / "own.py").write_text((package / "site" / "pressure.py").read_text())
    if not HAS_PRESSURE:
        (tmp_path / "pressure-of").symlink_to(package / "site" / "pressure-of")
    words = ["run", "--collect", "steps,own:Pressure", "-o", "run", "--", sys.executable, "-c", JOB]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert len(ringtap.open_job(tmp_path / "run").table("pressure"))
    found = json.loads(run(tmp_path, "doctor", "--json", "--collector", "own:Pressure").stdout)
    assert [check["state"] for check in found["checks"] if check["name"] == "own:Pressure"] == ["ok"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("onw:Own", "there is no module onw in this folder, or where Python finds modules"),
        ("own:Onw", "the module own has no 'Onw': give MODULE:CLASS of a collector"),
        ("own:Own", "its name is 'My Own': a collector's name consists of lowercase letters, digits, - and _"),
    ],
)
def test_the_doctor_says_what_is_wrong_with_a_collector_of_a_module(tmp_path, name, reason):
    (tmp_path / "own.py").write_text(own("return [1]", "My Own"))
    found = json.loads(run(tmp_path, "doctor", "--json", "--collector", name).stdout)
    (check,) = (check for check in found["checks"] if check["name"] == name)
    assert (check["state"], check["reason"], check["remedy"]) == ("failed", reason, "")


def test_the_installed_command_finds_a_module_in_the_working_directory(package, tmp_path):
    """Its own folder comes first in Python's path, not the working directory."""
    (tmp_path / "own.py").write_text((package / "site" / "pressure.py").read_text())
    if not HAS_PRESSURE:
        (tmp_path / "pressure-of").symlink_to(package / "site" / "pressure-of")
    command = [Path(sys.executable).with_name("ringtap"), "run", "--collect", "own:Pressure", "-o", "run", "--", "true"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    state = ringtap.open_job(tmp_path / "run").collectors.set_index("collector").loc["pressure"]
    assert state["state"] == "ok"


def own(read: str, name: str = "own") -> str:
    """A module with a collector that counts its reads in ``n``."""
    head = "from ringtap.collectors.collector_interface import SampledCollector\nclass Own(SampledCollector):\n"
    body = f"    name, columns, n = {name!r}, {{'a': 'gauge'}}, 0\n    def read(self):\n        self.n += 1\n"
    return f"{head}{body}        {read}\n"


BROKEN = {
    "raises on import": ("raise RuntimeError('no luck')", "no luck"),
    "ends on import": ("raise SystemExit(3)", "ended with exit code 3"),
    "needs a package": ("import no_such_package", "no_such_package"),
    "is not a collector": ("class Own: name = 'own'", "is not a collector"),
    "has no read": (own("pass").replace("def read", "def reed"), "is not a collector: it has no read"),
    "has no columns": (own("return [1]").replace("{'a': 'gauge'}", "['a']"), "columns is ['a']: give each column"),
    "has a wrong kind": (own("return [1]").replace("'gauge'", "'guage'"), "must be a counter or a gauge"),
    "returns nothing": (own("pass"), "read() returned None, not a list of numbers"),
    "fails without a text": (own("raise OSError"), "it cannot be read: OSError"),
    "is not there": ("", "could not be made: the module broken has no 'Own'"),
    "takes another's name": (
        own("return [1]", "nic"),
        "could not be made: its name is 'nic', which ringtap uses itself",
    ),
    "fails its check": (own("raise OSError(5, 'broken')"), "broken"),
    "returns too few": (own("return []"), "0 numbers"),
    "returns no number": (own("return [float('nan')]"), "nan for a"),
    "fails later": (own("return [1 // (self.n < 5)]"), "by zero"),
    "changes its type": (own("return [1 if self.n < 5 else 0.5]"), "was a whole number"),
    "ends the process": (own("return [1] if self.n < 5 else __import__('sys').exit(3)"), "ended with exit code 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_collector_leaves_the_job_and_the_others_alone(name, tmp_path):
    text, says = BROKEN[name]
    (tmp_path / "broken.py").write_text(text)
    words = ["run", "--collect", "steps,nic,broken:Own", "--every", "20ms", "-o", "run", "--"]
    done = run(tmp_path, *words, sys.executable, "-c", JOB)
    assert done.returncode == 0, done.stderr
    job = ringtap.open_job(tmp_path / "run")
    states = job.collectors.set_index("collector")
    assert states.loc["nic", "state"] == "ok"
    key = "own" if "own" in states.index else "broken:Own"
    assert states.loc[key, "state"] in ("failed", "unavailable")
    assert says in states.loc[key, "reason"]
    assert not states.loc[key, "reason"].startswith("UsageError")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "partial"
    assert re.search(f"the recording is partial: .*{re.escape(says)}", done.stderr)
    assert len(job.iterations) == 19
    assert len(job.table("nic")) > 20


def test_a_recording_without_a_job_says_what_it_lacks(tmp_path):
    (tmp_path / "broken.py").write_text(own("raise OSError(5, 'broken')"))
    done = run(tmp_path, "record", "--collect", "nic,broken:Own", "--duration", "300ms", "-o", "run")
    assert done.returncode == 0, done.stderr
    assert re.search("the recording is partial: .*own: .*broken", done.stderr)


def test_a_collector_that_blocks_delays_neither_the_job_nor_the_others(tmp_path):
    text = own("return [__import__('time').sleep(0 if self.n < 4 else 60) or self.n]")
    (tmp_path / "blocks.py").write_text(text)
    words = ["run", "--collect", "steps,nic,host,blocks:Own", "--every", "20ms", "-o", "run", "--"]
    done = run(tmp_path, *words, sys.executable, "-c", f"{JOB}\nopen('ended', 'w').close()")
    assert done.returncode == 0, done.stderr
    wait_for(lambda: [*(tmp_path / "run").glob("nodes/*/DONE")])  # the command waits for it for 15 s at most
    job = ringtap.open_job(tmp_path / "run")
    states = job.collectors.set_index("collector")
    assert states.loc["own", "state"] == "failed"
    assert "did not end within 10 s" in states.loc["own", "reason"]
    assert states.loc["nic", "state"] == states.loc["host", "state"] == "ok"
    assert len(job.table("own")) == 2, "what it had recorded before it blocked; its check read once, too"
    assert len(job.table("nic")) > 20


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("presure", r"there is no collector 'presure': .*MODULE:CLASS"),
        ("mine:", "is named MODULE:CLASS"),
        ("9:Own", "is named MODULE:CLASS"),
        ("nosuch:Own", "there is no module nosuch in this folder"),
    ],
)
def test_wrong_names_are_answered_before_the_job_starts(given, says, tmp_path):
    done = run(tmp_path, "run", "--collect", given, "-o", "run", "--", sys.executable, "-c", "print('ran')")
    assert done.returncode == 2
    assert re.search(says, done.stderr)
    assert "ran" not in done.stdout


def test_installed_traffic_is_planned_and_a_broken_one_is_left_out(package, tmp_path):
    words = ["traffic", "plan", "--kind", "one", "--duration", "1s", "--to", "127.0.0.1:5001", "-o", "one.plan"]
    done = run(tmp_path, *words, path=package / "site")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "one.plan").stat().st_size
    words[3] = "oen"
    done = run(tmp_path, *words, path=package / "site")
    assert done.returncode == 2
    assert "one" in done.stderr


def test_an_installed_site_is_known(package, tmp_path):
    script = (
        "from ringtap.slurm.site_profiles import load_site, site_names\n"
        "print(load_site('here').about, 'here' in site_names())\n"
    )
    environment = dict(os.environ) | {"PYTHONPATH": f"{package / 'site'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "A cluster of ours True", done.stderr


def test_numbers_of_a_collector_keep_their_type(tmp_path):
    class Own(SampledCollector):
        name = "own"
        columns = {"large_bytes": "counter", "share": "gauge", "state": "gauge"}  # noqa: RUF012

        def read(self):
            return [2**63 + 1, 0.25, -3]

    collector = Own(Context(tmp_path, 0.1))
    collector.start()
    collector.stop()
    fields = {field.name: (field.type, field.kind) for field in open_records(tmp_path / "own" / "own.rec").fields}
    assert fields["large_bytes"] == ("<u8", "counter")
    assert fields["share"] == ("<f8", "gauge")
    assert fields["state"] == ("<i8", "gauge")


def test_a_class_that_is_not_a_collector_is_refused_by_name():
    with pytest.raises(ringtap.UsageError, match="is not a collector: it has no check and no start"):
        collector_class("pathlib:Path")
