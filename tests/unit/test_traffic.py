"""Receiver and sender from Python: from any thread, event loop and kernel; nothing is left behind, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import ringtap
from ringtap.core.append_only_logs import open_records
from ringtap.core.errors import MeasurementError, RingtapWarning, UsageError
from tests.unit.agent_processes import ended
from tests.unit.traffic_processes import closed_port, plan_for, serving, wait_until

pytestmark = pytest.mark.shares

BYTES = 1_250_000  # of PLAN: 20 Mbit/s for 0.5 s
# whatever forks in this process ends it; Python 3.12 and later warn of that beside threads
STRICT = """
import asyncio, json, os, signal, sys, tempfile, threading, time
def refuse_fork(event, arguments):
    if event in ("os.fork", "os.forkpty"):
        os.write(2, b"this process forked")
        os._exit(99)
sys.addaudithook(refuse_fork)
import psutil, ringtap
from ringtap.core.flow_plan_format import Flow
PLAN = ringtap.FlowPlan("consistent", load="20mbit", duration="500ms", scale=100)
LONG = ringtap.FlowPlan("long-lived", duration="60s")
handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def left():
    me = psutil.Process()
    children = [child for child in me.children(recursive=True) if child.status() != "zombie"]
    found = [len(children), me.num_fds(), threading.active_count(), os.listdir(tempfile.gettempdir())]
    assert [signal.getsignal(number) for number in sorted(signal.valid_signals())] == handlers
    return found
def measure():
    with ringtap.receiver() as receiver:
        result = ringtap.send(PLAN, to=receiver.address)
    assert result.finished == result.flows == receiver.summary["flows"] == PLAN.flows, result
    return receiver.summary["bytes"]
"""
WAYS = {
    "the main thread": "total = measure()",
    "another thread": """
results = []
thread = threading.Thread(target=lambda: results.append(measure()))
thread.start(); thread.join(); total, = results
""",
    "three threads at once": """
results = []
threads = [threading.Thread(target=lambda: results.append(measure())) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
total = results[0] if len(set(results)) == 1 and len(results) == 3 else results
""",
    "asyncio.to_thread": """
async def main(): return await asyncio.to_thread(measure)
total = asyncio.run(main()); before[2] = threading.active_count()
""",
    "a coroutine, blocking": """
async def main(): return measure()
total = asyncio.run(main())
""",
}


def python(code: str, folder: Path, **popen: Any) -> subprocess.Popen[str]:
    """An interpreter for which each warning is an error, and whose temporary files are in the folder."""
    environment = dict(os.environ) | {"TMPDIR": str(folder)}
    command = [sys.executable, "-W", "error", "-c", STRICT + code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=environment, **(pipes | popen))


def ran(code: str, folder: Path) -> str:
    with python(code, folder) as process:
        try:
            out, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    return out


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves a process, a file descriptor, a thread, a temporary file or a handler of signals.

    What was there before may end meanwhile, or start others, as Slurm's daemons do; pytest ends its own timer, a
    SIGALRM, as soon as a test fails.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    me = psutil.Process()

    def handlers() -> list[object]:
        return [signal.getsignal(number) for number in sorted(signal.valid_signals() - {signal.SIGALRM})]

    processes, threads, files = set(me.children(recursive=True)), set(threading.enumerate()), open_files()
    of_signals = handlers()
    yield
    assert [one for one in me.children(recursive=True) if not {one, *one.parents()} & processes] == []
    assert set(threading.enumerate()) <= threads
    assert open_files() <= files
    assert list((tmp_path / "temporary").iterdir()) == []
    assert handlers() == of_signals


def open_files() -> set[tuple[str, str]]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add((path.name, str(path.readlink())))
    return found


def small() -> ringtap.FlowPlan:
    return ringtap.FlowPlan("consistent", load="20mbit", duration=0.5, scale=100)


def helpers() -> list[psutil.Process]:
    """Running helper processes of this one; other tests may leave other children."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("trafficgen import helper" in word for word in child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_traffic_is_sent_from(way: str, tmp_path: Path) -> None:
    code = f"before = left()\n{WAYS[way]}\nassert left() == before, (left(), before)\nprint(total)"
    assert ran(code, tmp_path) == f"{BYTES}\n"


@pytest.mark.usefixtures("nothing_left")
def test_every_byte_arrives_and_the_result_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    plan, seen = small(), []
    with ringtap.receiver() as receiver:
        host, port = receiver.address.split(":")
        assert host == "127.0.0.1"
        began_s = time.monotonic()
        result = ringtap.send(plan, (host, int(port)), progress=lambda *progress: seen.append(progress))
        took_s = time.monotonic() - began_s
    assert receiver.summary["flows"] == result.flows == result.finished == plan.flows
    assert receiver.summary["bytes"] == result.summary["acked_bytes"] == plan.size_bytes == BYTES
    assert (result.failed, result.unfinished, result.first_failure) == (0, 0, "")
    assert result.offered_bps == pytest.approx(20e6)
    assert repr(result).startswith(f"<Sent {plan.flows} flows in 500 ms: {plan.flows} finished, 0 unfinished")
    assert all(0 <= passed_s <= took_s and all_s == 0.5 for passed_s, all_s in seen)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("nothing_left")
def test_the_table_of_a_result_joins_the_plan_s() -> None:
    plan = small()
    with ringtap.receiver() as receiver:
        table = ringtap.send(plan, to=receiver.address).to_frame()
    assert table["flow"].tolist() == list(range(plan.flows))
    joined = table.merge(plan.to_frame(), on="flow", suffixes=("", "_planned"))
    assert joined["size_bytes"].tolist() == joined["size_bytes_planned"].tolist() == joined["acked_bytes"].tolist()
    started_s = (joined["start_ns"] - joined["start_ns"].min()) / 1e9
    planned_s = joined["start_s"] - joined["start_s"].min()
    spread_s = joined["lateness_s"].max() + 1e-6  # both sides are rounded to a nanosecond
    assert (started_s.astype(float) - planned_s).abs().max() <= spread_s
    assert set(table["state"]) == {"finished"}
    assert set(table["destination"]) == {receiver.address}
    assert table["source"].isna().all()
    assert (table["completion_s"] > 0).all()
    assert (table["lateness_s"] >= 0).all()
    assert table.attrs["units"]["start_ns"] == "ns since 1970-01-01 UTC"
    assert set(table.attrs["columns"]) == set(table)
    assert "start_utc" in ringtap.utc(table)


@pytest.mark.usefixtures("nothing_left")
def test_what_has_not_happened_is_na(tmp_path: Path) -> None:
    with ringtap.receiver() as receiver:
        plan = ringtap.FlowPlan("long-lived", duration="60s", flows=2)
        result = ringtap.send(plan, to=receiver.address, duration="300ms")
    assert result.duration_s == pytest.approx(0.3, abs=0.1)
    assert result.summary["stopped_by"] == "duration"
    assert result.to_frame()["size_bytes"].isna().all()


@pytest.mark.usefixtures("nothing_left")
def test_logs_tokens_and_several_receivers(tmp_path: Path) -> None:
    with (
        ringtap.receiver(token="secret", log=tmp_path / "a.rec") as a,
        ringtap.receiver(token="secret", log=str(tmp_path / "b.rec")) as b,
    ):
        result = ringtap.send(
            small(), to=[a.address, b.address], token="secret", log=tmp_path / "s.rec", connections="new"
        )
        assert not Path("/proc", str(helpers()[0].pid), "cmdline").read_text().count("secret")
    counts = [open_records(tmp_path / f"{name}.rec").count for name in "abs"]
    assert counts[0] + counts[1] == counts[2] == result.finished
    assert min(counts) > 0
    assert a.summary["bytes"] + b.summary["bytes"] == BYTES
    with pytest.raises(UsageError, match=r"s\.rec exists: a log is never overwritten"):
        ringtap.send(small(), to=a.address, log=tmp_path / "s.rec")


@pytest.mark.usefixtures("nothing_left")
def test_a_file_is_sent_to_the_receiver_of_the_command(tmp_path: Path) -> None:
    with serving() as serve:
        path = plan_for(tmp_path, serve.address)
        assert (
            ringtap.send(path).finished
            == ringtap.send(str(path), duration=5).finished
            == ringtap.FlowPlan.read(path).flows
        )


@pytest.mark.usefixtures("nothing_left")
def test_a_receiver_that_is_not_there_is_a_warning_or_an_error(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="no receiver answers at"):
        ringtap.send(small(), to=closed_port())
    with ringtap.receiver() as receiver, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ringtap.send(small(), to=[receiver.address, closed_port()])
    assert [(one.category, one.filename) for one in caught] == [(RingtapWarning, __file__)]
    assert "its flows will fail" in str(caught[0].message)
    assert result.failed > 0
    assert result.first_failure
    failed = result.to_frame().query("state == 'failed'")
    assert len(failed) == result.failed
    assert failed[["start_ns", "completion_s"]].isna().all(axis=None)


@pytest.mark.usefixtures("nothing_left")
def test_an_exception_in_the_block_ends_the_receiver() -> None:
    with pytest.raises(ZeroDivisionError), ringtap.receiver() as receiver:
        raise ZeroDivisionError
    with pytest.raises(MeasurementError, match="no receiver answers"):
        ringtap.send(small(), to=receiver.address)


@pytest.mark.usefixtures("nothing_left")
def test_an_exception_of_the_callback_ends_the_sender() -> None:
    began_s = time.monotonic()
    with ringtap.receiver() as receiver, pytest.raises(ZeroDivisionError):
        ringtap.send(ringtap.FlowPlan("long-lived", duration="60s"), to=receiver.address, progress=lambda *_: 1 / 0)
    assert time.monotonic() - began_s < 20


@pytest.mark.usefixtures("nothing_left")
def test_a_process_that_is_killed_is_one_sentence() -> None:
    said = r"the traffic's process \(pid \d+\) ended unexpectedly with SIGKILL"
    with pytest.raises(MeasurementError, match=said), ringtap.receiver():
        helpers()[0].kill()
    with ringtap.receiver() as receiver:
        (own,) = helpers()

        def kill(*_: float) -> None:
            for process in helpers():
                if process != own:
                    process.kill()

        with pytest.raises(MeasurementError, match="ended unexpectedly with SIGKILL"):
            ringtap.send(ringtap.FlowPlan("long-lived", duration="60s"), to=receiver.address, progress=kill)


INTERRUPTED = {
    "a sender": "ringtap.send(LONG, to=r.address, progress=lambda *_: print('now', flush=True))",
    "a receiver": "print('now', flush=True); time.sleep(60)",
}


@pytest.mark.parametrize("what", INTERRUPTED)
def test_ctrl_c_ends(what: str, tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches the whole process group."""
    code = f"""
before = left()
try:
    with ringtap.receiver() as r:
        {INTERRUPTED[what]}
except KeyboardInterrupt:
    assert left() == before, (left(), before)
    print("interrupted")
"""
    with ended(python(code, tmp_path, start_new_session=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert (process.returncode, out.splitlines()[-1:], errors) == (0, ["interrupted"], "")


def test_what_is_killed_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    code = """
with ringtap.receiver() as r:
    def tell(*_):
        print(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]), flush=True)
    ringtap.send(LONG, to=r.address, progress=tell)
"""
    with ended(python(code, tmp_path)) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        assert len(pids) == 5, "two helpers, a worker of each, and the launcher"
        assert len(list(tmp_path.iterdir())) == 1
        process.kill()
        process.communicate()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (ringtap.send, "the plan names no receiver: give to='HOST:PORT'"),
        (lambda plan: ringtap.send(plan, to="here"), "'here' is not an address"),
        (lambda plan: ringtap.send(plan, to=5), "5 is neither a text nor a list"),
        (lambda plan: ringtap.send(plan, to=[]), "to= is an empty list"),
        (lambda plan: ringtap.send(plan, to="127.0.0.1:0"), "has port 0"),
        (lambda plan: ringtap.send(plan, to="127.0.0.1:1", duration=-1), "the duration of -1 s is not a positive time"),
        (lambda plan: ringtap.send(plan, to="127.0.0.1:1", duration="1x"), "the duration '1x' is not understood"),
        (
            lambda plan: ringtap.send(plan, to="127.0.0.1:1", connections="keep"),
            "'keep' is unknown: did you mean 'kept'",
        ),
        (lambda plan: ringtap.send(plan, to="127.0.0.1:1", progress=5), "progress is 5, not a function"),
        (lambda plan: ringtap.send(plan, to="127.0.0.1:1", token=5), "the token is 5, not text"),
        (lambda plan: ringtap.send(plan, to="127.0.0.1:1", log=5), "the log is 5, not a path"),
        (lambda plan: ringtap.send(5), "the plan is 5, not a path"),
        (lambda plan: ringtap.send("missing.plan"), "missing.plan cannot be read"),
        (lambda plan: ringtap.receiver("here").__enter__(), "'here' is not an address"),
        (lambda plan: ringtap.receiver(5).__enter__(), "the address is 5, not text: give host:port"),
        (
            lambda plan: ringtap.receiver("0.0.0.0:0").__enter__(),
            "0.0.0.0:0: give token or set RINGTAP_TOKEN",
        ),
        (lambda plan: ringtap.receiver("203.0.113.1:0").__enter__(), "cannot listen on|others can reach"),
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_a_wrong_call_is_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        call(small())


def test_a_jupyter_kernel_sends_and_is_interrupted(tmp_path: Path) -> None:
    manager_module = pytest.importorskip("jupyter_client.manager")
    pytest.importorskip("ipykernel")
    environment = dict(os.environ) | {"TMPDIR": str(tmp_path), "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    manager, client = manager_module.start_new_kernel(kernel_name="python3", env=environment)
    try:
        assert _answer(client, STRICT + "before = left()\nprint(measure())") == f"{BYTES}\n"
        assert _answer(client, "async def main(): return await asyncio.to_thread(measure)\nprint(await main())") == (
            f"{BYTES}\n"
        )
        number = client.execute(
            "with ringtap.receiver() as r: ringtap.send(LONG, to=r.address, progress=lambda *_: print('now'))"
        )
        while "now" not in str(client.get_iopub_msg(timeout=30)["content"].get("text")):
            pass
        manager.interrupt_kernel()
        # a kernel that handles an error drops the cells that come meanwhile
        assert _output(client, number)[1] == "KeyboardInterrupt"
        assert _answer(client, "print(left()[0], left()[3])") == "0 []\n"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _answer(client: Any, code: str) -> str:
    """What a cell prints; its errors are this test's."""
    out, error = _output(client, client.execute(code))
    assert error == ""
    return out


def _output(client: Any, number: str) -> tuple[str, str]:
    """What the cell with this number prints until it ends, and the name of its error."""
    out = error = ""
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != number:
            continue
        content = message["content"]
        out += content.get("text", "")
        error = content.get("ename", error)
        if content.get("execution_state") == "idle":
            return out, error
