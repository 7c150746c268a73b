"""Hosts as steps of an allocation of a real Slurm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from ringtap.core.run_directory import read_json
from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]
ACCOUNT = "--account=def-x"
# as batch scripts ask for nodes: their own shape must not get in the steps' way
SHAPE = ["--ntasks-per-node=2", "--cpus-per-task=2", "--mem-per-cpu=200"]

WORK = """\
import json, signal, sys, time
from pathlib import Path
from ringtap.agents.hosts.slurm_nodes import SlurmHosts, allocated_nodes
from ringtap.core.append_only_logs import open_records
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory

folder = Path(sys.argv[1]) / "a run's \\"folder\\"\\nof two lines"
said = {"nodes": allocated_nodes()}
try:
    SlurmHosts({"a": "n9"})
except UsageError as error:
    said["refused"] = str(error)
hosts = SlurmHosts({"first": "n1", "second": "n2", "third": "n0"})
run = RunDirectory.create(folder, "job", [], 0, reference="first")
try:
    hosts.publish(run.path)
    said["answers"] = [hosts.ask(host, ["sh", "-c", "hostname; nproc; exit 3"]).stdout.split() for host in hosts.names]
    variables = hosts.ask("second", ["env"]).stdout.splitlines()
    said["variables"] = sorted(word.partition("=")[0] for word in variables if word.startswith("SLURM_"))
    words = 'trap "echo bye; exit 5" USR1; echo "$0"; echo up; while :; do sleep 0.02; done'
    log = run.node("second") / "log" / "it's.log"
    process = hosts.start("second", "job", ["sh", "-c", words, "two  'words'"], log)
    while not process.last_words().endswith("up"):
        time.sleep(0.02)
    said["job"] = [process.stop(signal.SIGUSR1), process.last_words()]
    agents = []
    for host in hosts.names:
        command = [*hosts.ringtap(host), "record", "--collect", "nic,host", "--join", hosts.path(host, run.path)]
        agents.append(hosts.start(host, "agent", [*command, "--node", host], run.node(host) / "log" / "capture.out"))
    for host in ("second", "third"):
        pings = run.path / "nodes" / host / "clock" / "pings.rec"
        while not (pings.exists() and pings.stat().st_size and open_records(pings).count):
            time.sleep(0.05)
    for agent in agents:
        agent.ask_to_stop()
    said["agents"] = [agent.stop() for agent in agents]
    hosts.gather(run.path)
    said["lost"] = hosts.lost()
finally:
    hosts.close()
print(json.dumps(said))
"""


def test_steps_run_commands_and_agents(cluster: SlurmCluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "results").mkdir()
    (tmp_path / "results").chmod(0o777)
    command = ["salloc", ACCOUNT, "--nodelist=n[0-2]", *SHAPE, "--quiet", sys.executable, "-c", WORK]
    done = cluster.run([*command, tmp_path / "results"], user="alice")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["nodes"] == ["n0", "n1", "n2"]
    assert [name for name, _ in said["answers"]] == ["n1", "n2", "n0"]
    # the test cluster binds nobody to cores: a step that were bound to one would show 1
    assert len({int(cores) for _, cores in said["answers"]}) == 1
    assert said["refused"] == "node n9 of a is not in this allocation, which has n0, n1, n2"
    # they are of the job, and no rank of it
    assert {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TMPDIR"} <= set(said["variables"])
    assert not {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"} & set(said["variables"]), said["variables"]
    assert said["job"] == [5, "two  'words' | up | bye"]
    assert (said["agents"], said["lost"]) == ([0, 0, 0], {})
    (run,) = (tmp_path / "results").iterdir()
    for node, host in {"first": "n1", "second": "n2", "third": "n0"}.items():
        item = read_json(run / "nodes" / node / "node.json")
        assert (item["status"], item["host"]) == ("complete", host), item["why"]
        assert open_records(run / "nodes" / node / "nic" / "nic.rec").count >= 1
        clock = read_json(run / "nodes" / node / "clock" / "clock.json")
        assert (clock["reference"], bool(clock["measurements"])) == ("first", node != "first"), clock["reason"]


GPUS = """\
import os
from ringtap.agents.hosts.slurm_nodes import SlurmHosts, allocated_nodes
hosts = SlurmHosts({node: node for node in allocated_nodes()})
try:
    print(*(hosts.ask(node, ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]).stdout.strip() for node in hosts.names))
finally:
    hosts.close()
"""


@pytest.mark.parametrize(
    "shape",
    [
        ["--gpus=4", "--nodes=2", "--ntasks-per-node=2"],
        ["--gpus-per-task=h100:1", "--nodes=2", "--ntasks=4", "--cpus-per-gpu=1", "--mem-per-gpu=100"],
        ["--gpus-per-node=h100:2", "--nodes=2", "--ntasks-per-gpu=1"],
    ],
)
def test_steps_have_all_gpus_of_the_job(shape: list[str], cluster: SlurmCluster) -> None:
    taste = {"SLURM_LABELIO": "1", "SRUN_CPUS_PER_TASK": "1", "SLURM_EXACT": "1"}  # frames go through all the same
    done = cluster.run(["salloc", ACCOUNT, *shape, "--quiet", sys.executable, "-c", GPUS], env=taste)
    # how Slurm spreads the four of them is its own business
    assert sorted("".join(done.stdout.split()).replace(",", "")) in (list("0011"), list("0012")), done.stderr


KILLED = """\
import os, signal, sys, time
from pathlib import Path
from ringtap.agents.hosts.slurm_nodes import SlurmHosts, allocated_nodes
hosts = SlurmHosts({node: node for node in allocated_nodes()})
for node in hosts.names:
    words = ["sh", "-c", "trap '' TERM; echo up; sleep 983 & sleep 983; sleep 983"]
    process = hosts.start(node, "job", words, Path(sys.argv[1]) / f"{node}.log")
    while process.last_words() != "up":
        time.sleep(0.02)
    print("there:", len(hosts.ask(node, ["pgrep", "-f", "sleep 98[3]"]).stdout.split()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
# as seen by the job itself, which goes on
LOOK = """\
"$0" -c "$1" "$2"; echo "killed: $?"
look() { srun --overlap --ntasks-per-node=1 --mem=0 sh -c "pgrep -f 'sleep 98[3]|hosts.worke[r]'; true"; }
for turn in $(seq 100); do left=$(look); [ -z "$left" ] && echo "none left" && break; sleep 0.3; done
"""


def test_nothing_on_the_nodes_outlives_the_controller(cluster: SlurmCluster, tmp_path: Path) -> None:
    command = ["salloc", ACCOUNT, "--nodes=2", "--quiet", "bash", "-c", LOOK, sys.executable, KILLED, tmp_path]
    done = cluster.run(command)
    *there, killed, left = done.stdout.splitlines()
    assert (killed, left) == ("killed: 137", "none left"), done.stderr
    assert len(there) == 2
    assert "there: 0" not in there, "there was nothing to be ended"


WATCH = """\
import json, sys, time
from pathlib import Path
from ringtap.agents.hosts.slurm_nodes import SlurmHosts, allocated_nodes
hosts = SlurmHosts({node: node for node in allocated_nodes()})
hosts.silent_s = 5.0  # in the place of 12, to have the answer sooner
count = "import time\\nfor i in range(10**6):\\n    print(i, flush=True)\\n    time.sleep(0.01)"
logs = {node: Path(sys.argv[1]) / f"{node}.log" for node in hosts.names}
jobs = {node: hosts.start(node, "job", [hosts.python(node), "-c", count], logs[node]) for node in hosts.names}
while not all(log.exists() and log.read_text() for log in logs.values()):
    time.sleep(0.02)
print("up", flush=True)
begin_s = time.monotonic()
while not hosts.lost() and time.monotonic() - begin_s < 20:
    hosts.ask(hosts.names[0], ["true"])  # its heartbeats alone, every 3 s, leave a busy machine little time
    time.sleep(0.2)
said = {"lost": hosts.lost(), "codes": {node: job.exit_code() for node, job in jobs.items()}}
said["counted"] = len(logs[hosts.names[0]].read_text())
said["answer"] = hosts.ask(hosts.names[0], ["hostname"]).stdout
begin_s = time.monotonic()
while not (more := len(logs[hosts.names[0]].read_text()) - said["counted"]) and time.monotonic() - begin_s < 20:
    time.sleep(0.05)
said["more"] = more
begin_s = time.monotonic()
hosts.close()
said["closed_s"] = time.monotonic() - begin_s
said["after"] = [hosts.lost(), jobs[hosts.names[0]].exit_code()]
print(json.dumps(said))
"""


def test_a_node_that_dies_is_named_and_the_others_go_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    words = ["salloc", ACCOUNT, "--nodelist=n[2-3]", "--no-kill", "--quiet", sys.executable, "-c", WATCH, tmp_path]
    command = cluster.command(words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "up\n"
        cluster.kill(3)
        out, err = controller.communicate(timeout=40)
    said = json.loads(out or f'"{err}"')
    assert list(said["lost"]) == ["n3"]
    # Slurm itself takes longer to notice
    assert said["lost"]["n3"].startswith("not a word for 5 s")
    assert "(Slurm calls n3 " in said["lost"]["n3"]
    assert (said["codes"], said["answer"]) == ({"n2": None, "n3": 255}, "n2\n")
    assert said["after"] == [said["lost"], -15]
    assert said["more"] > 0
    assert said["closed_s"] < 5


def test_outside_of_a_job_they_are_refused(cluster: SlurmCluster) -> None:
    code = "from ringtap.agents.hosts.slurm_nodes import *; SlurmHosts({'a': 'n1'})"
    done = cluster.run([sys.executable, "-c", code])
    assert 'reach = "slurm" works inside of a Slurm job' in done.stderr
