"""Real Horovod jobs under ``ringtap run``: alone, with and without ``horovodrun``, with ranks not recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ringtap import open_job
from ringtap.analysis.job.horovod_timeline import load_timeline
from ringtap.core.append_only_logs import open_records
from ringtap.core.thesis_neural_networks import PROFILES
from ringtap.examples.horovod_rank import rank_environment
from ringtap.workload.execution_trace import NodeType
from ringtap.workload.workload import size_of
from ringtap.workload.workload_from_profile import profile_workload, read_profiles
from tests.frameworks.ranks import QUICK, RANKS, quick
from tests.horovod.conftest import needs_horovod

pytestmark = [pytest.mark.shares, pytest.mark.together, needs_horovod]

JOB = Path(__file__).with_name("job.py")
ROOT = JOB.parents[2]
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
STEPS = 20
TENSORS = 8  # of job.py's model
AS_RANK = 'export HOROVOD_RANK=$RANK HOROVOD_LOCAL_RANK=$RANK; unset RANK LOCAL_RANK WORLD_SIZE; exec "$@"'


def launch(*command: str | Path, ringtap: Path | None = None, collect: str = "nic,steps,horovod", **extra: str) -> str:
    """Run a job to its end, recorded into the run directory where one is named; what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "RINGTAP_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | quick() | extra
    prefix = [sys.executable, "-m", "ringtap.cli", "run", "--collect", collect, "-o", str(ringtap), "--"]
    done = subprocess.run(
        [*(prefix if ringtap else []), *map(str, command)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def two_ranks(*command: str | Path, ringtap: Path | None = None, **extra: str) -> str:
    """Run a job of two ranks, started as ``horovodrun`` starts them, but without its own import of torch."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.start() - 1)}
    server.init(get_host_assignments(parse_hosts("host0:2"), 2))
    try:
        environment = {"WORLD_SIZE": "2"} | rank_environment(launcher) | extra
        return launch("bash", "-c", RANKS, "ranks", "sh", "-c", AS_RANK, "sh", *command, ringtap=ringtap, **environment)
    finally:
        server.stop()
        server._httpd.server_close()


def node(run: Path) -> Path:
    (folder,) = (run / "nodes").iterdir()
    return folder


def steps(run: Path) -> dict[int, pd.DataFrame]:
    """Step records by rank."""
    found = {}
    for path in (node(run) / "steps").glob("rank*.rec"):
        if path.suffixes == [".rec"]:
            file = open_records(path)
            rows = pd.DataFrame(file.tail(), columns=[one.name for one in file.fields])
            assert file.about["rank"] not in found
            found[file.about["rank"]] = rows
    assert not list((node(run) / "steps").glob("hook-*.log"))
    return found


def settings(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((node(run) / "horovod" / "settings.json").read_text())
    return found


def result(words: str) -> str:
    (line,) = [line for line in words.splitlines() if "losses" in line]
    return line[line.index("losses") :]


def assert_exact(rows: pd.DataFrame, count: int = STEPS) -> None:
    """Each training step once: not that of Horovod's wrapper and that within, nor the one made to get Adam's state."""
    assert list(rows["step"]) == list(range(count))
    assert set(rows["optimizer"]) == {0}
    assert set(rows["kind"]) == {0}
    assert set(rows["backwards"]) == {1}


@pytest.fixture(scope="module")
def plain() -> str:
    """The result of the job of two ranks without ringtap."""
    return result(two_ranks(sys.executable, JOB, str(STEPS)))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job of two ranks, recorded, and what it printed."""
    run = tmp_path_factory.mktemp("horovod") / "run"
    return run, launch(HOROVODRUN, "-np", "2", "--gloo", sys.executable, JOB, str(STEPS), "0.01", ringtap=run)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job of two ranks, recorded without Horovod's recorder, and what it printed."""
    run = tmp_path_factory.mktemp("profiled") / "run"
    return run, two_ranks(sys.executable, JOB, str(STEPS), ringtap=run, collect="steps,profile")


def test_step_counts_are_exact(recorded: tuple[Path, str]) -> None:
    ranks = steps(recorded[0])
    assert sorted(ranks) == [0, 1]
    for rows in ranks.values():
        assert_exact(rows)


def test_training_gives_the_same_with_and_without_ringtap(recorded: tuple[Path, str], plain: str) -> None:
    assert result(recorded[1]) == plain


def test_the_timeline_is_on_the_clock_of_the_steps(recorded: tuple[Path, str]) -> None:
    """The gradients' communication of each iteration lies between the end of the step before and the end of its own."""
    rows = steps(recorded[0])[0]
    table, damaged = load_timeline(node(recorded[0]) / "horovod" / "timeline.json")
    assert damaged == 0
    gradients = table[(table["operation"] == "ALLREDUCE") & table["tensor"].str.contains("weight|bias")]
    ends = rows["end_ns"].to_numpy()
    # ends are rounded down to microseconds
    iteration = np.searchsorted(ends, gradients["end_ns"].to_numpy())
    assert np.bincount(iteration, minlength=STEPS)[:STEPS].tolist() == [TENSORS] * STEPS
    before = np.concatenate(([0], ends[:-1]))[iteration]
    assert (gradients["start_ns"].to_numpy() >= before).all()
    assert gradients["bytes"].sum() == STEPS * 4 * (3 * (64 * 64 + 64) + 64 + 1)


def test_the_exchange_of_each_iteration_is_timed_at_every_rank(recorded: tuple[Path, str]) -> None:
    """Horovod's timeline begins when the first rank has a gradient, and ends before both have all."""
    job = open_job(recorded[0])
    assert job.logs.work.source == "horovod"
    assert not job.logs.work.why
    assert job.logs.work.gradient_bytes == 4 * (3 * (64 * 64 + 64) + 64 + 1)
    begins_ns, ends_ns = [], []
    for rank, rows in steps(recorded[0]).items():
        (path,) = (node(recorded[0]) / "steps").glob(f"rank{rank}-*.horovod.rec")
        file = open_records(path)
        passes = pd.DataFrame(file.tail(), columns=[one.name for one in file.fields])
        assert passes["iteration"].tolist() == list(range(STEPS))
        moments = passes[["backward_start_ns", "comm_start_ns", "backward_end_ns", "comm_end_ns"]].to_numpy()
        assert (np.diff(moments, axis=1) >= 0).all()
        assert (passes["forward_ns"] == -1).all()
        # every other step waits for the gradients itself
        assert (rows["passes_ns"][::2] > 0).all()
        assert (rows["passes_ns"] < rows["end_mono_ns"] - rows["start_mono_ns"]).all()
        assert (rows["passes_ns"][1::2] == 0).all()
        begins_ns.append(passes["comm_start_ns"].to_numpy())
        ends_ns.append(passes["comm_end_ns"].to_numpy())
    table, _ = load_timeline(node(recorded[0]) / "horovod" / "timeline.json")
    gradients = table[(table["operation"] == "ALLREDUCE") & table["tensor"].str.contains("weight|bias")]
    iteration = np.searchsorted(np.max(ends_ns, axis=0), gradients["end_ns"])
    assert np.bincount(iteration, minlength=STEPS).tolist() == [TENSORS] * STEPS
    first_ns = np.min(begins_ns, axis=0)[iteration] - 1000  # the timeline has microseconds
    assert (gradients["negotiate_start_ns"].to_numpy() >= first_ns).all()
    shares = job.ranks[["compute_s", "exposed_s", "optimizer_s", "unattributed_s"]].sum(axis=1)
    mean_s = job.logs.work.iterations["iteration_s"][job.logs.measured].mean()
    assert shares.to_numpy() == pytest.approx([mean_s] * 2, rel=0.01)


def test_settings_say_what_holds(recorded: tuple[Path, str]) -> None:
    found = settings(recorded[0])
    assert found["timeline"]["by"] == "ringtap"
    assert found["timeline"]["path"] == str(node(recorded[0]) / "horovod" / "timeline.json")
    assert (found["rank"], found["size"], found["horovod"]) == (0, 2, "0.28.1")
    assert found["effective"]["HOROVOD_FUSION_THRESHOLD"] == "134217728"
    assert found["effective"]["HOROVOD_CYCLE_TIME"] == "1"


def test_what_the_user_has_set_holds(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    own = {"HOROVOD_TIMELINE": str(mine), "HOROVOD_CYCLE_TIME": "7", "HOROVOD_SECRET_KEY": "hush"}
    two_ranks(sys.executable, JOB, "3", ringtap=tmp_path / "run", **own)
    assert len(load_timeline(mine)[0]) > 3 * TENSORS
    found = settings(tmp_path / "run")
    assert found["timeline"] == {"by": "job", "path": str(mine), "reason": ""}
    assert found["effective"]["HOROVOD_CYCLE_TIME"] == "7"
    assert "hush" not in (node(tmp_path / "run") / "horovod" / "settings.json").read_text()
    assert not list((node(tmp_path / "run") / "horovod").glob("timeline*"))


def test_without_horovod_among_the_recorders_steps_are_exact_all_the_same(profiled: tuple[Path, str]) -> None:
    ranks = steps(profiled[0])
    assert sorted(ranks) == [0, 1]
    for rows in ranks.values():
        assert_exact(rows)
    assert not (node(profiled[0]) / "horovod" / "settings.json").exists()


def test_a_job_of_one_process_needs_no_launcher(tmp_path: Path) -> None:
    launch(sys.executable, JOB, "5", ringtap=tmp_path / "run")
    assert_exact(steps(tmp_path / "run")[0], 5)
    assert "one rank" in settings(tmp_path / "run")["timeline"]["reason"]


@pytest.mark.parametrize("unrecorded", [0, 1])
def test_a_rank_that_is_not_recorded_costs_the_timeline_and_not_the_job(
    tmp_path: Path, plain: str, unrecorded: int
) -> None:
    """Horovod ends a job whose ranks do not all have HOROVOD_TIMELINE: ringtap may not set it for some."""
    script = f'[ "$HOROVOD_RANK" = {unrecorded} ] && unset RINGTAP_RUN; exec "$@"'
    words = two_ranks("sh", "-c", script, "sh", sys.executable, JOB, str(STEPS), ringtap=tmp_path / "run")
    assert result(words) == plain
    assert list(steps(tmp_path / "run")) == [1 - unrecorded]
    assert not list((node(tmp_path / "run") / "horovod").glob("timeline*"))
    if unrecorded:
        assert "rank 1 is not recorded" in settings(tmp_path / "run")["timeline"]["reason"]


def test_horovod_ends_a_job_whose_ranks_differ_in_the_variable(tmp_path: Path) -> None:
    """Why ranks agree first; should a Horovod come that bears it, they need not."""
    script = '[ "$HOROVOD_RANK" = 1 ] && unset HOROVOD_TIMELINE; exec "$@"'
    job = "import horovod.torch as hvd; hvd.init(); hvd.barrier()"
    command = [HOROVODRUN, "-np", "2", "--gloo", "sh", "-c", script, "sh", sys.executable, "-c", job]
    environment = dict(os.environ) | {"HOROVOD_TIMELINE": str(tmp_path / "t.json"), "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}
    environment |= {"OMP_NUM_THREADS": "1"} | quick()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0


def test_an_unwritable_folder_costs_the_timeline_and_not_the_job(tmp_path: Path, plain: str) -> None:
    """A file stands where the folder should be: rank 0 says no before the ranks agree."""
    run = tmp_path / "run"
    script = 'd="$RINGTAP_RUN/nodes/$RINGTAP_NODE"; mkdir -p "$d"; echo x > "$d/horovod"; exec "$@"'
    assert result(two_ranks("sh", "-c", script, "sh", sys.executable, JOB, str(STEPS), ringtap=run)) == plain
    assert (node(run) / "horovod").is_file()


def test_a_real_model_moves_its_gradients_under_horovod(tmp_path: Path) -> None:
    """DenseNet-161 has the most tensors."""
    job = ["--horovod", "--model", "densenet161", "--batch", "1", "--image", "64", "--iterations", "4"]
    script = ROOT / "examples" / "real_model.py"
    # scripts/prepare.sh installs torchvision there
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), QUICK, str(Path(sys.prefix) / "torchvision")])}
    words = two_ranks(sys.executable, script, *job, ringtap=tmp_path / "run", **paths)
    assert "Model: densenet161, 28681000 parameters, 2 ranks on cpu" in words
    found = open_job(tmp_path / "run").summary()
    assert found["phases"]["source"] == "horovod"
    assert found["demand"]["gradient_bytes"] == sum(tensor.bytes for tensor in PROFILES["densenet161"].tensors)


def test_a_profile_has_the_bytes_of_all_tensors(profiled: tuple[Path, str], plain: str) -> None:
    """The gradients, and the loss that the job averages after each step; nothing else changes."""
    run, output = profiled
    assert result(output) == plain
    workload = profile_workload(read_profiles(run), "run")
    assert sum(one["elements"] for one in workload.about["parameters"]) == 3 * (64 * 64 + 64) + 64 + 1
    sizes = [size_of(node) for node in workload.traces[0] if node.type == NodeType.COMM_COLL]
    assert sum(sizes) == 4 * (3 * (64 * 64 + 64) + 64 + 1) + 4
    assert len(sizes) <= TENSORS + 1
