"""Standard streams that the caller has closed, or that cannot be written: every command, every combination."""

import json
import os
import signal
import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import Truth, write_ddp_job
from tests.unit.agent_processes import PLAIN, RINGTAP, ROOT, gone, node_item, rows_of, run_item, wait_for
from tests.unit.agents.hook.test_sitecustomize import fake_torch

pytestmark = pytest.mark.shares

CLOSED = [closed for count in range(4) for closed in combinations((0, 1, 2), count)]
CLOSINGS = ("<&-", ">&-", "2>&-")
NAMES = [" ".join(CLOSINGS[number] for number in closed) or "none closed" for closed in CLOSED]
every_combination = pytest.mark.parametrize("closed", CLOSED, ids=NAMES)

# Says into a file which of its standard descriptors are open, and steps three times
JOB = """
import fcntl, os, sys
found = []
for number in range(3):
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
        found.append(number)
    except OSError:
        pass
os.closerange(3, 4)
with open(sys.argv[1], "w") as file:
    file.write(" ".join(map(str, found)))
import torch.optim
optimizer = torch.optim.Optimizer()
for _ in range(3):
    optimizer.step()
    for number in {0, 1, 2} - set(found):
        try:
            os.write(number, b"from the job")
        except OSError:
            pass
"""


def shell(closed: tuple[int, ...], command: list[str], **keywords: object) -> "subprocess.CompletedProcess[str]":
    """Run a command with some of its standard streams closed."""
    script = 'exec "$@" ' + " ".join(CLOSINGS[number] for number in closed)
    return subprocess.run(
        ["sh", "-c", script, "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **keywords,  # type: ignore[call-overload]
    )


@every_combination
def test_a_job_with_closed_descriptors_finds_them_closed_and_is_recorded(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    run, found = tmp_path / "run", tmp_path / "found"
    command = [*RINGTAP, "run", "-o", str(run), "--node", "here", *PLAIN, "--", sys.executable, "-c", JOB, str(found)]
    done = shell(closed, command, env=dict(os.environ) | {"PYTHONPATH": f"{fake_torch(tmp_path)}:{ROOT}"})
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert found.read_text().split() == [str(number) for number in range(3) if number not in closed]
    gone(run)
    assert run_item(run)["status"] == node_item(run)["status"] == "complete", node_item(run)["why"]
    assert rows_of(run)
    (steps,) = (run / "nodes" / "here" / "steps").glob("rank0-*.rec")
    assert (open_records(steps).count, open_records(steps).torn_bytes) == (3, 0)


@every_combination
def test_a_capture_and_an_attached_process_with_closed_descriptors(tmp_path: Path, closed: tuple[int, ...]) -> None:
    run = tmp_path / "run"
    command = [*RINGTAP, "record", "-o", str(run), "--node", "here", *PLAIN, "--duration", "100ms"]
    done = shell(closed, command)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert run_item(run)["status"] == "complete", run_item(run)["why"]
    assert rows_of(run)
    with subprocess.Popen(["sleep", "60"]) as watched:
        attach = [
            sys.executable,
            "-m",
            "ringtap.agents.node.record_unsupervised_process",
            str(run),
            "there",
            str(watched.pid),
        ]
        done = shell(closed, attach)
        assert (done.returncode, done.stderr) == (0, "")
        log = run / "nodes" / "there" / "nic" / "nic.rec"
        wait_for(lambda: log.exists() and log.stat().st_size and open_records(log).count > 1)
        watched.kill()
    wait_for((run / "nodes" / "there" / "DONE").exists)
    assert node_item(run, "there")["status"] == "complete"


@every_combination
def test_traffic_with_closed_descriptors(tmp_path: Path, closed: tuple[int, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    plan, sent, received = (str(tmp_path / name) for name in ("plan", "sent.rec", "received.rec"))
    traffic = [*RINGTAP, "traffic"]
    words = ["--kind", "consistent", "--load", "10mbit", "--duration", "200ms", "--to", f"127.0.0.1:{port}"]
    assert shell(closed, [*traffic, "plan", *words, "-o", plan]).returncode == 0
    serve = [*traffic, "serve", "--bind", f"127.0.0.1:{port}", "--log", received]
    script = 'exec "$@" ' + " ".join(CLOSINGS[number] for number in closed)
    with subprocess.Popen(
        ["sh", "-c", script, "sh", *serve], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        wait_for(lambda: f":{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text())
        done = shell(closed, [*traffic, "send", plan, "--log", sent])
        server.send_signal(signal.SIGTERM)
        words_of_server = server.communicate(timeout=30)[0].decode()
    assert (done.returncode, server.returncode) == (0, 0), done.stderr + words_of_server
    assert "Traceback" not in done.stderr + words_of_server
    logs = [open_records(Path(path)) for path in (sent, received)]
    assert logs[0].count == logs[1].count > 0
    assert [log.torn_bytes for log in logs] == [0, 0]


# In one interpreter that has loaded everything: forks, closes, runs a command line, says how it ended
DRIVER = """
import importlib, json, os, sys
from itertools import combinations
from pathlib import Path
from ringtap import cli

def run(arguments, closed, folder):
    folder.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(f"../{folder.name}.{name}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, number)
            os.close(file)
        for number in closed:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        code = 99
        try:
            code = cli.main(arguments)
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            Path("traceback").write_text(repr(error))
        for stream in (sys.stdout, sys.stderr):
            if stream:
                stream.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for module, _ in [*cli.VERBS.values(), *(entry for verbs in cli.SUB_VERBS.values() for entry in verbs.values())]:
    if module:
        importlib.import_module(module)
for module in ("matplotlib.backends.backend_agg", "numba", "pandas", "scipy.optimize", "scipy.special"):
    importlib.import_module(module)  # the commands import these late
top, commands = Path(sys.argv[1]), json.loads(sys.argv[2])
for number, arguments in enumerate(commands):
    for count in range(4):
        for closed in combinations((0, 1, 2), count):
            if arguments[0] == "report" and 0 < count < 3:  # takes seconds
                continue
            folder = top / f"{number}-{''.join(map(str, closed))}"
            code = run(arguments, closed, folder)
            made = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
            texts = [(top / f"{folder.name}.{name}").read_text().replace(str(folder), "") for name in ("out", "err")]
            print(json.dumps([arguments, closed, code, made, *texts]), flush=True)
"""


def test_every_other_command_with_closed_descriptors_ends_as_with_open_ones(tmp_path: Path) -> None:
    """The same exit code, the same files, and the same words on what is open."""
    write_ddp_job(tmp_path / "job", Truth(iterations=5))
    write_sweep(tmp_path / "sweep", [("vgg16", "consistent")])
    job, sweep = str(tmp_path / "job"), str(tmp_path / "sweep")
    points, capture = str(ROOT / "examples/points.csv"), str(ROOT / "examples/ring.pcap.gz")
    commands = [
        ["--version"],
        ["run"],
        ["testbed", "status"],
        ["testbed", "down", "none"],
        ["doctor", "--json"],
        ["live", "--plain", job],
        ["flows", capture],
        ["structure", capture, "--json"],
        ["analyze", "--json", job],
        ["sweep", str(ROOT / "examples/demo.toml"), "--dry-run"],
        ["submit", "--print", "-o", "made", "--time", "10", "--", "true"],
        ["status", job],
        ["merge", job],
        ["report", sweep, "-o", "made"],
        ["fit", points, "--capacity", "25gbit", "--n", "0.5", "--bootstrap", "20", "-o", "fit.json"],
        ["predict", "--fit", points, "--load", "18gbit"],
        ["demand", "--params", "25000000", "--workers", "3"],
        ["traffic", "zipapp", "-o", "made.pyz"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "made"), json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(CLOSED) * len(commands) - 6
    usual = None
    for arguments, closed, code, made, *texts in rows:
        if not closed:
            usual = code, made, texts
            assert code in (0, 1, 2), texts
        assert usual
        said = ["" if number in closed else usual[2][number - 1] for number in (1, 2)]
        # what these say is of the moment: other tests build testbeds
        if arguments[0] in ("doctor", "live") or arguments[:2] == ["testbed", "status"]:
            said = texts
        assert (arguments, closed, code, made, texts) == (arguments, closed, usual[0], usual[1], said)


@pytest.mark.parametrize("redirection", [">/dev/full", "1</dev/null"])
@pytest.mark.parametrize("arguments", [["doctor", "--json"], ["demand", "--params", "25000000", "--workers", "3"]])
def test_an_output_that_cannot_be_written_is_said_in_a_sentence(redirection: str, arguments: list[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *RINGTAP, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("ringtap: the output cannot be written: ")


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [*RINGTAP, "demand", "--params", "25000000", "--workers", "3"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, b"")
