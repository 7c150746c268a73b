"""Gradients exchanged by message graphs in a real job: the same training as with the all-reduce of gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringtap.core.terminal_escaping import as_command
from tests.frameworks.ranks import WarmInterpreter, quick, variables

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).parent / "jobs" / "exchanged.py"
ALGORITHMS: list[tuple[str, dict[str, int]]] = [
    ("ring", {}), ("tree", {"pieces": 2}), ("double-tree", {}), ("halving-doubling", {}),
    ("hierarchical", {"group": 2}), ("parameter-server", {"shards": 2}), ("in-network", {"pieces": 4}),
]  # fmt: skip
WORKERS = 4


def test_training_is_that_of_an_all_reduce(tmp_path: Path, warm: WarmInterpreter) -> None:
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | quick(str(ROOT)) | variables(WORKERS)
    others = [("parameter-server", "--shards", "2", "--number", str(number)) for number in range(2)]
    others.append(("in-network", "--pieces", "4"))
    with ExitStack() as stack:
        servers = []
        for words in others:
            command = [sys.executable, "-m", "ringtap.workload.ddp_message_graph_exchange", "--workers", str(WORKERS)]
            servers.append(stack.enter_context(subprocess.Popen([*command, "--collective", *words], env=env)))
            stack.callback(servers[-1].kill)
        output, _ = warm.run([str(JOB), json.dumps(ALGORITHMS)], tmp_path / "job", env, WORKERS)
        # they end with the job
        assert [server.wait(20) for server in servers] == [0, 0, 0]
    found = [json.loads(line) for line in output.splitlines()]
    assert [each["algorithm"] for each in found] == [name for name, _ in ALGORITHMS]
    for each in found:
        # sums in another order differ by the rounding of float32, here of losses around 1
        assert each["loss"] < 1e-5, each
        assert each["weights"] < 1e-5, each
        assert each["alike"], each


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [("halving-doubling", "needs a power of two of workers, not 3"), ("ringg", "collective 'ringg' is unknown")],
)
def test_an_algorithm_that_does_not_go_with_the_workers_is_named(algorithm: str, says: str) -> None:
    from torch.distributed import HashStore

    from ringtap.core.errors import UsageError
    from ringtap.workload.ddp_message_graph_exchange import GradientExchange
    from ringtap.workload.lowering import Algorithms

    with pytest.raises(UsageError, match=says):
        GradientExchange(HashStore(), 0, 3, Algorithms(algorithm))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--collective", "ring", "--workers", "4"], "--number 0: ring has 0 servers beside workers"),
        (["--collective", "in-network", "--workers", "4"], "MASTER_PORT is not set: set it as for the workers"),
        (["--collective", "in-network", "--workers", "x"], "--workers 'x'"),
    ],
)
def test_a_server_that_cannot_start_says_so(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ringtap.workload.ddp_message_graph_exchange import main

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(sys, "argv", ["ddp_comm_hook", *arguments])
    assert as_command(main) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("ringtap: ")
    assert says in errors


REFUSED = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

def ends(make):
    try:
        make()
    except SystemExit as error:
        print(error.code)

def step(model):
    model(torch.ones(1, 1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
layer = torch.nn.Linear(1, 1)
ends(lambda: step(layer))
for words in ("ringg", "halving-doubling", "tree pieces=many", "tree blocks=2"):
    os.environ["RINGTAP_COLLECTIVE"] = words
    ends(lambda: DistributedDataParallel(layer))
os.environ["RINGTAP_COLLECTIVE"] = "ring"
ends(lambda: DistributedDataParallel(layer, process_group=dist.new_group([0, 1])))
"""


def test_a_job_that_cannot_exchange_as_asked_ends_with_a_sentence(tmp_path: Path) -> None:
    folder = str(ROOT / "agents" / "hook")
    env = os.environ | quick(folder, str(ROOT)) | {"RINGTAP_RUN": str(tmp_path)}
    command = [sys.executable, "-c", REFUSED]
    done = subprocess.run(
        command, env=env | {"RINGTAP_COLLECTIVE": "ring"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["2"] * 6), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("ringtap: ")]
    expected = [
        "'ring' asks: the job steps an optimizer before it has made a DistributedDataParallel model",
        "'ringg' asks: --collective 'ringg' is no all-reduce: did you mean 'ring'?",
        "'halving-doubling' asks: halving-doubling needs a power of two of workers, not 3: use ring",
        "'tree pieces=many' asks: behind the algorithm, only group=G, shards=K and pieces=P are known",
        "'tree blocks=2' asks: behind the algorithm, only group=G, shards=K and pieces=P are known",
        "'ring' asks: ring cannot exchange the gradients of a model with a process group of its own",
    ]
    assert len(said) == len(expected)
    for line, words in zip(said, expected, strict=True):
        assert f"gradients cannot be exchanged as RINGTAP_COLLECTIVE={words}" in line
