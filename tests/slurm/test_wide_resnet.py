"""The Wide-ResNet training of several nodes by sbatch, recorded: under DDP, and under Horovod beside it."""

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.model.bytes_per_iteration import demand
from ringtap.slurm.submission_file_names import SubmitPaths
from tests.slurm.cluster import ROOT, SlurmCluster

pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = (sys.executable, "-m", "ringtap.cli")
TRAINING = ("--epochs", "4", "--images", "1024", "--batch", "32", "--depth", "10", "--width", "1")
TRAINING += ("--target-accuracy", "0.15", "--patience", "2")
PARAMETERS = 77_562
EPOCH = re.compile(
    r"Epoch = (\d+): Cumulative Time = ([\d.]+), Epoch Time = ([\d.]+), Images/sec = ([\d.]+), "
    r"Validation Loss = ([\d.]+), Validation Accuracy = ([\d.]+)\n"
    r"Communication Time \(all_reduce\): ([\d.]+) seconds\n"
)


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster) -> dict[str, tuple[Path, str]]:
    """Both trainings at once, on two nodes each: their run directories and what they printed."""
    found = {}
    for kind, options in (("ddp", []), ("horovod", ["--horovod"])):
        words = [*RINGTAP, "submit", "-o", f"wide resnet {kind}", "--account", "def-x", "--nodes", "2", "--time", "10"]
        words += ["--mem", "1500M"]
        words += [*options, "--json", "--", "python", str(ROOT / "examples" / "wide_resnet.py"), *options, *TRAINING]
        done = cluster.run(words, user="alice", env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        found[kind] = json.loads(done.stdout)
    for item in found.values():
        ended = cluster.wait(item["job"], timeout=200)
        assert ended["JobState"] == "COMPLETED", output_of(item)
    return {kind: (Path(item["run"]), output_of(item)) for kind, item in found.items()}


def output_of(item: dict[str, Any]) -> str:
    return SubmitPaths(Path(item["run"])).output(item["job"]).read_text()


@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_it_prints_an_epochs_time_and_that_of_an_all_reduce(kind: str, jobs: dict[str, tuple[Path, str]]) -> None:
    _, output = jobs[kind]
    epochs = EPOCH.findall(output)
    assert [int(epoch[0]) for epoch in epochs] == list(range(1, len(epochs) + 1))
    assert 2 <= len(epochs) <= 4
    for _, cumulative, took, rate, loss, accuracy, all_reduce in epochs:
        assert 0 < float(took) <= float(cumulative) + 0.001
        assert float(rate) == pytest.approx(1024 / float(took), rel=0.01)  # of times with three digits
        assert 0 < float(loss) < 10
        assert 0 < float(accuracy) < 1
        assert 0 < float(all_reduce) < 5
    if all(float(epoch[5]) >= 0.15 for epoch in epochs[-2:]):
        assert f"Early stopping after epoch {len(epochs)}" in output


def test_both_libraries_train_alike(jobs: dict[str, tuple[Path, str]]) -> None:
    """The first epoch's loss: sums of gradients differ in their last digits alone, of which 16 steps make a little."""
    losses = [float(EPOCH.findall(jobs[kind][1])[0][4]) for kind in ("ddp", "horovod")]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_its_epochs_and_samples_per_s_are_those_that_it_prints(
    kind: str, jobs: dict[str, tuple[Path, str]], cluster: SlurmCluster
) -> None:
    run, output = jobs[kind]
    done = cluster.run([*RINGTAP, "analyze", run, "--target-accuracy", "0.15", "--json"], user="alice", timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    printed = [list(map(float, epoch)) for epoch in EPOCH.findall(output)]
    names = ("epoch", "cumulative_s", "epoch_s", "samples_per_s", "validation_loss", "validation_accuracy")
    assert [[row[name] for name in names] for row in found["epochs"]["rows"]] == [epoch[:6] for epoch in printed]
    assert [run / found["epochs"]["source"]] == list(run.glob("submit/slurm-*.out"))
    seconds = sum(epoch[2] for epoch in printed)
    assert found["epochs"]["samples_per_s"] == pytest.approx(len(printed) * 1024 / seconds, rel=0.001)
    reached = next((epoch for epoch in printed if epoch[5] >= 0.15), None)
    target = found["epochs"]["target"]
    assert target == (reached and {"epoch": reached[0], "validation_accuracy": reached[5], "cumulative_s": reached[1]})
    # 1024 pictures in 16 steps of two ranks
    throughput = found["throughput"]
    assert (throughput["ranks"], throughput["batch"], throughput["batch_from"]) == (2, 32, "epochs")
    assert throughput["samples_per_s"] == pytest.approx(64 / found["iterations"]["mean_s"])
    # An epoch's time holds its training and its validation: it is at least the time from the end of its first step to
    # that of its last one, and at most the time from the last step before it to the first one after it.
    rows = {row["step"]: row["iteration_s"] for row in found["iterations_table"]}
    for number, (_, _, epoch_s, *_) in enumerate(printed[1:], 1):
        first, after = number * 16, (number + 1) * 16
        least_s = sum(rows[step] for step in range(first + 1, after))
        assert least_s < epoch_s
        assert after not in rows or epoch_s < least_s + rows[first] + rows[after]


@pytest.mark.parametrize("kind", ["ddp", "horovod"])
def test_the_network_that_could_not_be_seen_is_in_its_report(
    kind: str, jobs: dict[str, tuple[Path, str]], cluster: SlurmCluster
) -> None:
    run, output = jobs[kind]
    assert json.loads((run / "run.json").read_text())["status"] == "complete"
    assert all((run / "nodes" / node / "DONE").is_file() for node in cluster.nodes if (run / "nodes" / node).exists())
    done = cluster.run([*RINGTAP, "report", run], user="alice", timeout=120)
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads((run / "report" / "report.json").read_text())
    assert data["run"]["status"] == "complete"
    assert (data["run"]["ranks"], len(data["run"]["nodes"])) == (2, 2)
    steps = len(EPOCH.findall(output)) * 1024 // (2 * 32)
    # DDP tells when the first iteration began; else it is not known, and they are counted from the first step's end
    assert data["iterations"]["count"] == steps - (kind == "horovod")
    # equation 3.1: the gradients, and what goes round beside them: a validation and a timed all-reduce an epoch, and
    # messages that say so, of which Horovod's are more; a small model's share of these is not small
    asked = demand(PARAMETERS, 2).worker_bytes
    assert asked < data["demand"]["sent_bytes"] < 1.25 * asked
    assert {row["source_rank"] for row in data["flows"]["rows"] if row["traffic_class"] == "training"} == {0, 1}
    page = (run / "report" / "report.html").read_text()
    assert "Payload between ranks" in page
    assert all(node in page for node in data["run"]["nodes"])


def test_srun_within_a_script_of_ones_own_is_recorded_on_every_node(cluster: SlurmCluster) -> None:
    """On the first node, slurmstepd starts the ranks, which do not descend from ringtap."""
    run = cluster.home("alice") / "srun in a script"
    job = [
        "srun",
        "--ntasks-per-node=2",
        "python",
        str(ROOT / "examples" / "wide_resnet.py"),
        *TRAINING,
        "--epochs",
        "1",
    ]
    words = shlex.join([*RINGTAP, "run", "-o", str(run), "--", *job])
    where = ["--account=def-x", "--nodes=2", "--ntasks-per-node=2", "--mem=2500M", f"--output={run}.out"]
    done = cluster.run(
        ["sbatch", "--wait", *where, "--wrap", words], user="alice", env={"OMP_NUM_THREADS": "1"}, timeout=150
    )
    output = Path(f"{run}.out").read_text()
    assert done.returncode == 0, done.stderr + output
    assert f"Model: WRN-10-1, {PARAMETERS} parameters, 4 ranks on cpu" in output
    assert [epoch[0] for epoch in EPOCH.findall(output)] == ["1"]
    done = cluster.run([*RINGTAP, "analyze", run, "--json"], user="alice", timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Sockets are sampled about once in an iteration, so bytes are those of the whole recording: 8 iterations, 4 ranks.
    # On a busy machine iterations take longer: bytes are those of one, but for what analyze calls uncertain.
    counted = found["bytes"]
    iterations, unsure = (8, 0.0) if counted["per"] == "run" else (1, counted["uncertain_share"])
    asked = iterations * 4 * demand(PARAMETERS, 4).worker_bytes
    assert (1 - max(0.02, unsure)) * asked < counted["classes"]["training"]["sockets"] < 1.25 * asked
    # a socket may have closed before its owner was looked up
    assert counted["classes"]["other"]["sockets"] < 0.01 * asked
