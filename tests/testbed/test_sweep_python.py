"""Sweeps and testbeds from Python: in a thread of a program, with a callback, and what wrong calls say."""

import logging
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import ringtap
from ringtap.agents.testbed import registry
from ringtap.core.errors import RingtapError
from tests.testbed.sweeps import run
from tests.testbed.test_sweep import MARKS, points, status

pytestmark = [pytest.mark.shares, pytest.mark.together("sweeps"), pytest.mark.usefixtures("unchanged_machine")]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "recipes.md"
KEYS = {
    "name": "quick",
    "scale": 500,
    "loads": [0, 0.5],
    "traffic": ["burst"],
    "window": {"warmup_iterations": 2, "settle": 0.2, "min_time": "1s", "min_iterations": 5, "max_time": 10},
    "models": [{"name": "marks", "parameters": 1, "command": MARKS}],
}
# an interpreter that ends if it forks, and for which each warning is an error
IN_A_THREAD = """
import os, signal, sys, threading
sys.addaudithook(lambda event, _: event in ("os.fork", "os.forkpty") and os._exit(99))
import ringtap
recipe = sys.stdin.read()
before = [signal.getsignal(number) for number in sorted(signal.valid_signals())], threading.active_count()
names = {"ringtap": ringtap}
lines = recipe.strip().splitlines()
def measure():
    exec("\\n".join(lines[:-1]), names)
    names["answer"] = eval(lines[-1], names)
thread = threading.Thread(target=measure)
thread.start()
thread.join()
assert before == ([signal.getsignal(number) for number in sorted(signal.valid_signals())], threading.active_count())
print(names["answer"].to_csv(index=False))
"""


def recipe(title: str) -> str:
    part = PAGE.read_text().split(f"## {title}\n")[1]
    found = re.search(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.mark.alone(2)  # the recipe's links of 250 Mbit/s are filled before it measures
def test_the_recipe_of_a_sweep_runs_in_a_thread_without_a_fork(tmp_path: Path) -> None:
    text = recipe("A sweep, measured")
    assert len([line for line in text.splitlines() if line]) <= 5
    command = [sys.executable, "-W", "error", "-c", IN_A_THREAD]
    done = subprocess.run(command, input=text, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    *told, _, none, loaded = done.stdout.strip().splitlines()
    assert any(re.fullmatch(r"resnet50-consistent: \d+ s left", line) for line in told)
    assert none.startswith("resnet50-consistent,0.0,")
    assert loaded.startswith("resnet50-consistent,15.0,")


def test_an_exception_of_progress_keeps_the_points_and_the_command_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[float] = []

    def stop(progress: object) -> None:
        seen.append(progress.done_s / progress.total_s if progress.total_s else 0.0)  # type: ignore[attr-defined]
        if progress.point is not None:  # type: ignore[attr-defined]
            raise ZeroDivisionError("enough")

    # tests before this one may have left Python's resource tracker, and threads of libraries
    children, threads = set(psutil.Process().children(recursive=True)), threading.active_count()
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    with pytest.raises(ZeroDivisionError), caplog.at_level(logging.INFO, "ringtap"):
        ringtap.run_sweep(output=tmp_path / "out", progress=stop, **KEYS)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")
    assert any(record.message.startswith("Testbed up") for record in caplog.records)
    assert any("--resume" in record.message for record in caplog.records)
    assert seen == sorted(seen)
    assert 0 < seen[-1] < 1
    assert (status(tmp_path / "out"), len(points(tmp_path / "out"))) == (("partial", "ZeroDivisionError: enough"), 1)
    assert set(psutil.Process().children(recursive=True)) <= children
    assert threading.active_count() <= threads
    assert [signal.getsignal(number) for number in sorted(signal.valid_signals())] == handlers
    path = ringtap.run_sweep(output=str(tmp_path / "out"), resume=True, **KEYS)  # type: ignore[arg-type]
    assert path == tmp_path / "out"
    assert [point["step"] for point in points(path)] == [0, 1]
    assert status(path) == ("complete", "")
    report = run("report", path)
    assert report.returncode in (0, 1), "a fit needs more than two points"
    assert "Traceback" not in report.stderr


def test_a_testbed_ends_with_its_block_and_names_its_hosts() -> None:
    with ringtap.testbed(2, 50e6, queue="100kB") as testbed:
        name = testbed.state.spec.name
        assert repr(testbed) == f"<Testbed {name}: S0, S1 with links of 50 Mbit/s>"
        command = testbed.command("S0", "sh", "-c", "hostname; getent hosts S1")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.stdout.split()[:2] == ["S0", testbed.address("S1")], done.stderr
        with pytest.raises(ringtap.UsageError, match="has no host 's0': did you mean 'S0'"):
            testbed.address("s0")
        with pytest.raises(ringtap.UsageError, match="there is no command"):
            testbed.command("S0")
    assert name not in {found.spec.name for found in registry.all_testbeds()}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (ringtap.run_sweep, "there is no plan"),
        (lambda: ringtap.run_sweep(5), "5 is not a plan"),
        (lambda: ringtap.run_sweep("missing.toml"), "missing.toml cannot be read"),
        (lambda: ringtap.run_sweep({}), r"the plan: \[sweep\] is missing"),
        (lambda: ringtap.run_sweep(**(KEYS | {"laods": [0]})), "sweep.laods is not a key of this table; did you mean"),
        (lambda: ringtap.run_sweep(**(KEYS | {"loads": "0"})), "sweep.loads"),
        (lambda: ringtap.run_sweep(**(KEYS | {"models": ["vgg61"]})), "vgg16"),
        (
            lambda: ringtap.run_sweep(**(KEYS | {"models": "vgg16"})),
            "models is 'vgg16': give a list, such as",
        ),
        (lambda: ringtap.run_sweep(**(KEYS | {"traffic": ["busrt"]})), "burst"),
        (lambda: ringtap.run_sweep(**(KEYS | {"window": 5})), "window must be a table: give a dict"),
        (lambda: ringtap.run_sweep(**(KEYS | {"window": {"settle": -1}})), "window.settle"),
        (lambda: ringtap.run_sweep(**(KEYS | {"capacity": "25gbti"})), "did you mean 25gbit"),
        (lambda: ringtap.run_sweep("examples/demo.toml", loads=[0]), "loads= cannot change a whole plan"),
        (lambda: ringtap.run_sweep("examples/demo.toml", series="vgg16-brust"), "did you mean"),
        (lambda: ringtap.run_sweep("examples/demo.toml", access="gruop"), "did you mean 'group'"),
        (lambda: ringtap.run_sweep(models=["vgg16"]), "sweep.loads is missing"),
        (lambda: ringtap.run_sweep(**KEYS, progress=5), "progress is 5, not a function"),
        (lambda: ringtap.testbed(0), "hosts has none: a testbed needs 2 to 200 hosts"),
        (lambda: ringtap.testbed(10**9), "hosts"),
        (lambda: ringtap.testbed("S0,S0"), "hosts names 'S0' twice: give each host of a testbed a name of its own"),
        (lambda: ringtap.testbed(capacity="250mbti"), "did you mean 250mbit"),
        (lambda: ringtap.testbed(capacity=float("nan")), "capacity nan is not a finite number"),
        (lambda: ringtap.testbed(capacity=None), "capacity"),
        (lambda: ringtap.testbed(mtu="1500"), "mtu must be a whole number, not '1500'"),
        (lambda: ringtap.testbed(congestion_control="cubci"), "cubci"),
    ],
)
def test_a_wrong_call_is_one_sentence(call: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RingtapError, match=says) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
