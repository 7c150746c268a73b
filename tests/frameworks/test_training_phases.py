"""Which steps are iterations, of real jobs: what ringtap says beside the job's own log."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringtap.analysis.job.run import Job, open_job
from tests.frameworks.ranks import QUICK

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

JOB = Path(__file__).resolve().parent / "jobs" / "phases.py"
TORCHRUN = "torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node"
# A job notes an end some lines after the step that ringtap records, and on a busy machine another program may run in
# between: the sums of the same iterations differ by that at either end.
NEAR = 0.02
PREEMPTED_MS = 15
LIMIT_S = 150


def record(folder: Path, command: list[str]) -> Job:
    """Run a job under ``ringtap run``, with all that it starts, and open its run."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": QUICK}
    words = [sys.executable, "-m", "ringtap", "run", "-o", "run", "--collect", "steps,ddp", "--", *command]
    with subprocess.Popen(words, cwd=folder, env=env, text=True, stderr=subprocess.PIPE, start_new_session=True) as job:
        try:
            errors = job.communicate(timeout=LIMIT_S)[1]
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, errors[-4000:]
    return open_job(folder / "run")


def alone(name: str, *words: str) -> list[str]:
    return [sys.executable, str(JOB), name, *words]


def ranks(name: str, count: int = 2) -> list[str]:
    return [sys.executable, "-m", *TORCHRUN.split(), str(count), str(JOB), name]


def own(folder: Path, name: str, size: int = 1) -> dict[str, Any]:
    """The job's own log, of rank 0."""
    found: dict[str, Any] = json.loads((folder / f"own-{name}-{size}-0.json").read_text())
    return found


def rows(job: Job) -> list[tuple[int, int, int, int]]:
    """Ranks, stretches, steps and steps in no iteration of each phase."""
    return [tuple(row) for row in job.phases[["ranks", "stretches", "steps", "left_out"]].to_numpy().tolist()]


def check_times(job: Job, phase: int, *stretches_ms: list[float]) -> None:
    """Compare the last iterations of each stretch of a phase with the job's own: it does not time the first one."""
    table = open_job(job.path, phase=phase).iterations
    found = [rows["iteration_s"].to_numpy() for _, rows in table.groupby("stretch")]
    assert len(found) == len(stretches_ms)
    for seconds, own_ms in zip(found, stretches_ms, strict=True):
        assert len(seconds) in (len(own_ms), len(own_ms) + 1)
        own_s = sum(own_ms) / 1000
        assert seconds[-len(own_ms) :].sum() == pytest.approx(own_s, rel=NEAR, abs=PREEMPTED_MS / 1000)


@pytest.mark.parametrize(("name", "expected"), [("epochs", (1, 5, 60, 0)), ("folds", (1, 3, 30, 0))])
def test_alike_optimizers_one_after_the_other(tmp_path: Path, name: str, expected: tuple[int, ...]) -> None:
    job = record(tmp_path, alone(name))
    assert rows(job) == [expected]
    check_times(job, 1, *own(tmp_path, name)["times"].values())


def test_a_gan_with_five_steps_of_the_critic_per_step_of_the_generator(tmp_path: Path) -> None:
    job = record(tmp_path, alone("gan"))
    assert rows(job) == [(1, 1, 60, 0)]
    check_times(job, 1, own(tmp_path, "gan")["times"]["round"])
    assert "An iteration is a round of the optimizers: 5 steps of Adam of 8,320 parameters" in job.report()


def test_an_optimizer_per_parameter_that_steps_within_the_backward_pass(tmp_path: Path) -> None:
    job = record(tmp_path, alone("per_layer"))
    assert rows(job) == [(1, 1, 120, 0)]
    check_times(job, 1, own(tmp_path, "per_layer")["times"]["loop"])
    assert (job.rank_iterations["optimizer_s"] == 0).all()  # it is part of the backward pass


def test_os_execv(tmp_path: Path) -> None:
    job = record(tmp_path, alone("replaced"))
    assert rows(job) == [(1, 3, 36, 0)]
    assert job.iterations["generation"].value_counts().to_dict() == {0: 11, 1: 11, 2: 11}
    assert job.iterations["iteration_s"].median() == pytest.approx(0.01, abs=0.005)


def test_fine_tuning_of_the_head_and_of_all_layers(tmp_path: Path) -> None:
    job = record(tmp_path, ranks("fine_tuning"))
    assert rows(job) == [(2, 1, 20, 0), (2, 1, 40, 0)]
    times = own(tmp_path, "fine_tuning", 2)["times"]
    check_times(job, 1, times["head"])
    check_times(job, 2, times["all"])
    assert job.phases["iterations"].tolist() == [10, 20]  # DDP timed the first forward pass of either
    assert job.iterations["iteration"].count() == 20
    assert job.iterations["warm_up"].sum() <= 3


@pytest.mark.parametrize("sizes", ["1 2", "2 1"])
def test_jobs_of_several_sizes(tmp_path: Path, sizes: str) -> None:
    job = record(
        tmp_path, ["sh", "-c", f'for n in {sizes}; do "{sys.executable}" -m {TORCHRUN} $n "{JOB}" plain; done']
    )
    expected = {1: (1, 1, 20, 0), 2: (2, 1, 40, 0)}
    order = [int(size) for size in sizes.split()]
    assert rows(job) == [expected[size] for size in order]
    for phase, size in enumerate(order, 1):
        check_times(job, phase, own(tmp_path, "plain", size)["times"]["loop"])
    parts = job.summary()["parts"]
    assert sum(parts[name] for name in ("compute_s", "exposed_s", "optimizer_s", "unattributed_s")) == pytest.approx(
        job.summary()["iterations"]["mean_s"]
    )


def test_an_elastic_job_to_which_a_node_is_added(tmp_path: Path) -> None:
    """The second agent of torchrun comes after ten steps; the first one then starts its rank again, in a world of two.

    With one store for all rounds of its rendezvous, torchrun itself waits for ever: the new agent does not learn where
    the store is.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = (
        f'"{sys.executable}" -m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 2 '
        f"--monitor-interval 0.2 --rdzv-backend c10d --rdzv-id grows --rdzv-endpoint 127.0.0.1:{port} "
        "--local-addr 127.0.0.1 --rdzv-conf last_call_timeout=1,is_host="
    )
    script = f"""
        export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
        {torchrun}1 "{JOB}" elastic &
        until [ -e steps-alone ] && [ "$(wc -c < steps-alone)" -ge 10 ]; do sleep 0.1; done
        {torchrun}0 "{JOB}" elastic &
        wait
    """
    job = record(tmp_path, ["sh", "-c", script])
    alone_steps = (tmp_path / "steps-alone").stat().st_size
    (first, *_, steps, left_out), second = rows(job)
    assert (first, left_out, second) == (1, 0, (2, 1, 40, 0))
    assert 0 <= steps - alone_steps <= 1  # it may have been stopped between a step and its note
    check_times(job, 2, own(tmp_path, "elastic", 2)["times"]["loop"])
    assert job.phases["starts"].tolist() == [1, 1]


def test_a_helper_with_more_steps_than_its_rank(tmp_path: Path) -> None:
    job = record(tmp_path, ranks("helper"))
    assert sorted(rows(job)) == [(1, 1, 150, 0), (2, 1, 120, 0)]
    assert (job.ranks["rank"].tolist(), len(job.iterations)) == ([0, 1], 60)
    check_times(job, int(job.phases["phase"][job.phases["shown"]].iloc[0]), own(tmp_path, "helper", 2)["times"]["loop"])


def test_steps_before_and_after_the_process_group(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = record(tmp_path, alone("before_group", str(port)))
    assert sorted(rows(job)) == [(1, 2, 12, 0)] * 2 + [(2, 1, 40, 0)]
    assert job.ranks["rank"].tolist() == [0, 1]
    assert job.ranks["compute_s"].notna().all()  # DDP's log has the name of the steps of its process group


def test_time_that_is_not_attributed_is_compared_between_ranks_and_iterations(tmp_path: Path) -> None:
    job = record(tmp_path, ranks("loader"))
    data = job.summary()
    assert (data["slowest"]["rank"], data["slowest"]["stands_out"]) == (1, True)
    assert data["slowest"]["differences"][0]["measure"] == "unattributed_s"
    assert "What differs on it: time not attributed (loading data, Python" in job.report()
    times = job.ranks.set_index("rank")["unattributed_s"]
    assert float(times[1] - times[0]) == pytest.approx(0.04, rel=0.2)
    first = data["slow_iterations"]["differences"][0]
    assert first["measure"] == "unattributed_s"
    assert first["here"] - first["others"] == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("name", ["closures", "accumulated"])
def test_passes_in_a_closure_and_under_no_sync_are_computation(tmp_path: Path, name: str) -> None:
    job = record(tmp_path, ranks(name))
    found = own(tmp_path, name, 2)
    times = found["times"]["loop"]
    check_times(job, 1, times)
    rank = job.ranks.set_index("rank").loc[0]
    parts = job.summary()["parts"]
    shown = [parts[part] for part in ("compute_s", "exposed_s", "optimizer_s", "unattributed_s")]
    assert sum(shown) == pytest.approx(job.summary()["iterations"]["mean_s"])
    assert min(shown) >= 0
    # The job times both passes, with the wait for the gradients of the other rank: 22 iterations. Each forward pass has
    # 0.06 ms of DDP's Python around it. After each exchange DDP copies the gradients back, 0.2 ms here. Both are
    # attributed to nothing: 1 to 2 % of passes of this size.
    passes_s = found["parts"]["compute"] / 22
    assert float(rank["compute_s"] + rank["exposed_s"]) == pytest.approx(passes_s, rel=2 * NEAR)
    # what the job spends besides: 4 pauses of 3 ms, or the arithmetic of L-BFGS
    if name == "accumulated":
        assert 0.012 <= float(rank["unattributed_s"]) < 0.012 + 0.1 * passes_s
    else:
        assert 0 < float(rank["optimizer_s"]) < sum(times[1:]) / 22_000 - passes_s
