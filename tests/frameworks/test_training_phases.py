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

import numpy as np
import pytest

from ringtap.analysis.job.run import Job, open_job
from ringtap.analysis.job.stragglers import slow_places
from ringtap.analysis.statistics.to_arrays import Array
from tests.frameworks.ranks import QUICK, RecordedInterpreter

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

JOB = Path(__file__).resolve().parent / "jobs" / "phases.py"
COLLECT = ["--collect", "steps,ddp"]
TORCHRUN = "torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node"
# A job notes the end of an iteration some lines after the step that ringtap records. On a busy machine another program
# may run in between, for tens of milliseconds, but not at most of the ends.
NEAR = 0.02
NOTED_S = 0.0015
LIMIT_S = 150


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return env | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": QUICK}


def record(folder: Path, command: list[str]) -> Job:
    """Run a job under ``ringtap run``, with all that it starts, and open its run."""
    env, words = environment(), [sys.executable, "-m", "ringtap", "run", "-o", "run", *COLLECT, "--", *command]
    with subprocess.Popen(words, cwd=folder, env=env, text=True, stderr=subprocess.PIPE, start_new_session=True) as job:
        try:
            errors = job.communicate(timeout=LIMIT_S)[1]
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, errors[-4000:]
    return open_job(folder / "run")


def record_forked(hooked: RecordedInterpreter, folder: Path, name: str, ranks: int = 0) -> Job:
    """Run a job whose ranks need not import torch, and open its run."""
    hooked.run(COLLECT, [str(JOB), name], folder / "run", environment(), ranks)
    return open_job(folder / "run")


def alone(name: str, *words: str) -> list[str]:
    return [sys.executable, str(JOB), name, *words]


def own(folder: Path, name: str, size: int = 1, rank: int = 0) -> dict[str, Any]:
    """The job's own log, of a rank."""
    found: dict[str, Any] = json.loads((folder / f"own-{name}-{size}-{rank}.json").read_text())
    return found


def rows(job: Job) -> list[tuple[int, int, int, int]]:
    """Ranks, stretches, steps and steps in no iteration of each phase."""
    return [tuple(row) for row in job.phases[["ranks", "stretches", "steps", "left_out"]].to_numpy().tolist()]


def own_times(folder: Path, name: str, size: int = 1) -> dict[str, Array]:
    """Times between the ends of the iterations of each loop, by the job's own logs: the last rank ends one."""
    ranks = [own(folder, name, size, rank)["ends_s"] for rank in range(size)]
    return {loop: np.diff(np.max([ends[loop] for ends in ranks], axis=0)) for loop in ranks[0]}


def check_times(job: Job, phase: int, *stretches_s: Array) -> None:
    """Compare the ends of each stretch's last iterations with the job's own: it does not time the first iteration."""
    table = open_job(job.path, phase=phase).iterations
    found = [rows["iteration_s"].to_numpy() for _, rows in table.groupby("stretch")]
    assert len(found) == len(stretches_s)
    for seconds, own_s in zip(found, stretches_s, strict=True):
        assert len(seconds) in (len(own_s), len(own_s) + 1)
        before_note_s = np.append(0, np.cumsum(own_s - seconds[-len(own_s) :]))
        apart_s = np.abs(before_note_s - np.median(before_note_s))
        assert np.median(apart_s) < max(NEAR * own_s.mean(), NOTED_S)


@pytest.mark.parametrize(("name", "expected"), [("epochs", (1, 5, 60, 0)), ("folds", (1, 3, 30, 0))])
def test_alike_optimizers_one_after_the_other(
    hooked: RecordedInterpreter, tmp_path: Path, name: str, expected: tuple[int, ...]
) -> None:
    job = record_forked(hooked, tmp_path, name)
    assert rows(job) == [expected]
    check_times(job, 1, *own_times(tmp_path, name).values())


def test_a_gan_with_five_steps_of_the_critic_per_step_of_the_generator(
    hooked: RecordedInterpreter, tmp_path: Path
) -> None:
    job = record_forked(hooked, tmp_path, "gan")
    assert rows(job) == [(1, 1, 60, 0)]
    check_times(job, 1, own_times(tmp_path, "gan")["round"])
    assert "An iteration is a round of the optimizers: 5 steps of Adam of 8,320 parameters" in job.report()


def test_an_optimizer_per_parameter_that_steps_within_the_backward_pass(
    hooked: RecordedInterpreter, tmp_path: Path
) -> None:
    job = record_forked(hooked, tmp_path, "per_layer")
    assert rows(job) == [(1, 1, 120, 0)]
    check_times(job, 1, own_times(tmp_path, "per_layer")["loop"])
    assert (job.rank_iterations["optimizer_s"] == 0).all()  # it is part of the backward pass


def test_os_execv(tmp_path: Path) -> None:
    job = record(tmp_path, alone("replaced"))
    assert rows(job) == [(1, 3, 36, 0)]
    assert job.iterations["generation"].value_counts().to_dict() == {0: 11, 1: 11, 2: 11}
    check_times(job, 1, *own_times(tmp_path, "replaced").values())


def test_fine_tuning_of_the_head_and_of_all_layers(hooked: RecordedInterpreter, tmp_path: Path) -> None:
    job = record_forked(hooked, tmp_path, "fine_tuning", ranks=2)
    assert rows(job) == [(2, 1, 20, 0), (2, 1, 40, 0)]
    times = own_times(tmp_path, "fine_tuning", 2)
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
        check_times(job, phase, own_times(tmp_path, "plain", size)["loop"])
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
    noted = (tmp_path / "steps-alone").read_bytes()
    (first, *_, steps, left_out), second = rows(job)
    assert (first, left_out, second) == (1, 0, (2, 1, 40, 0))
    # where the new agent is late for a round of the rendezvous, the rank starts alone again; it may have been stopped
    # between a step and its note
    starts = noted.count(b"|")
    assert 0 <= steps - noted.count(b".") <= starts
    check_times(job, 2, own_times(tmp_path, "elastic", 2)["loop"])
    assert job.phases["starts"].tolist() == [starts, 1]


def test_a_helper_with_more_steps_than_its_rank(hooked: RecordedInterpreter, tmp_path: Path) -> None:
    job = record_forked(hooked, tmp_path, "helper", ranks=2)
    assert sorted(rows(job)) == [(1, 1, 150, 0), (2, 1, 120, 0)]
    assert (job.ranks["rank"].tolist(), len(job.iterations)) == ([0, 1], 60)
    check_times(job, int(job.phases["phase"][job.phases["shown"]].iloc[0]), own_times(tmp_path, "helper", 2)["loop"])


def test_steps_before_and_after_the_process_group(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = record(tmp_path, alone("before_group", str(port)))
    assert sorted(rows(job)) == [(1, 2, 12, 0)] * 2 + [(2, 1, 40, 0)]
    assert job.ranks["rank"].tolist() == [0, 1]
    assert job.ranks["compute_s"].notna().all()  # DDP's log has the name of the steps of its process group


def test_time_that_is_not_attributed_is_compared_between_ranks_and_iterations(
    hooked: RecordedInterpreter, tmp_path: Path
) -> None:
    job = record_forked(hooked, tmp_path, "loader", ranks=2)
    data = job.summary()
    assert (data["slowest"]["rank"], data["slowest"]["stands_out"]) == (1, True)
    assert data["slowest"]["differences"][0]["measure"] == "unattributed_s"
    assert "What differs on it: time not attributed (loading data, Python" in job.report()
    # how long a rank sleeps is its own to say: on a busy machine it wakes late
    pauses_s = np.array([own(tmp_path, "loader", 2, rank)["pauses_s"] for rank in (0, 1)])
    times = job.ranks.set_index("rank")["unattributed_s"]
    more_s = np.diff(pauses_s[:, -len(job.logs.measured) :].mean(axis=1))[0]
    assert float(times[1] - times[0]) == pytest.approx(more_s, rel=0.2)
    first = data["slow_iterations"]["differences"][0]
    assert first["measure"] == "unattributed_s"
    slow, table = slow_places(job), job.iterations
    usual = np.setdiff1d(job.logs.measured, slow)
    paused_s = pauses_s.mean(axis=0)[table["step"]]
    longer_s = paused_s[slow].mean() - np.median(paused_s[usual])
    assert first["here"] - first["others"] == pytest.approx(longer_s, rel=0.2)


@pytest.mark.parametrize("name", ["closures", "accumulated"])
def test_passes_in_a_closure_and_under_no_sync_are_computation(
    hooked: RecordedInterpreter, tmp_path: Path, name: str
) -> None:
    job = record_forked(hooked, tmp_path, name, ranks=2)
    times = own_times(tmp_path, name, 2)["loop"]
    check_times(job, 1, times)
    rank = job.ranks.set_index("rank").loc[0]
    parts = job.summary()["parts"]
    shown = [parts[part] for part in ("compute_s", "exposed_s", "optimizer_s", "unattributed_s")]
    assert sum(shown) == pytest.approx(job.summary()["iterations"]["mean_s"])
    assert min(shown) >= 0
    # The job times both passes, with the wait for the gradients of the other rank: 22 iterations. Each forward pass has
    # 0.06 ms of DDP's Python around it. After each exchange DDP copies the gradients back, 0.2 ms here. Both are
    # attributed to nothing: 1 to 2 % of passes of this size.
    passes_s = own(tmp_path, name, 2)["parts"]["compute"] / 22
    assert float(rank["compute_s"] + rank["exposed_s"]) == pytest.approx(passes_s, rel=2 * NEAR)
    # What the job spends besides: 4 pauses of 3 ms, from which it wakes late on a busy machine, or the arithmetic of
    # L-BFGS.
    if name == "accumulated":
        paused_s = sum(own(tmp_path, name, 2)["pauses_s"]) / 22
        assert 0.012 <= paused_s <= float(rank["unattributed_s"]) < paused_s + 0.1 * passes_s
    else:
        ends_s = own(tmp_path, name, 2)["ends_s"]["loop"]  # of the same rank: the other one may end later
        assert 0 < float(rank["optimizer_s"]) < (ends_s[-1] - ends_s[1]) / 22 - passes_s
