"""Gradients sent by priority in a real job: the same training as with an all-reduce, and the order of the messages."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ringtap.core.errors import UsageError
from tests.frameworks.ranks import WarmInterpreter

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

JOB = Path(__file__).parent / "jobs" / "scheduled.py"
# elements of the three layers, and of their pieces of 400 bytes
FIRST, SECOND, LAST = 20 * 50 + 50, 50 * 31 + 31, 31 + 1
PIECES = {FIRST: [100] * 10 + [50], SECOND: [100] * 15 + [81], LAST: [32]}


def test_training_is_that_of_an_all_reduce_and_messages_have_their_order(tmp_path: Path, warm: WarmInterpreter) -> None:
    output, _ = warm.run([str(JOB)], tmp_path / "job", os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, 2)
    found = {each["method"]: each for each in map(json.loads, output.splitlines())}
    assert sorted(found) == ["bytescheduler", "fifo", "p3", "tac", "tic"]
    # sums of two ranks, divided by two: the same to the rounding of float32
    assert all(each["difference"] < 1e-6 for each in found.values()), found
    assert found["fifo"]["messages"] == [LAST, SECOND, FIRST]
    # the last layer's gradient is under way when the others get ready
    assert found["tic"]["messages"] == found["tac"]["messages"] == [LAST, FIRST, SECOND]
    assert found["p3"]["messages"] == [*PIECES[LAST], *PIECES[FIRST], *PIECES[SECOND]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lifo",), "the method 'lifo' is unknown: choose fifo, tic, tac, p3, bytescheduler"),
        (("p3",), "P3 and ByteScheduler need the size of pieces"),
        (("fifo", 1000), "P3 and ByteScheduler need the size of pieces"),
        (("p3", 1000, 2000), "ByteScheduler may have a credit"),
    ],
)
def test_wrong_methods_are_refused(arguments: tuple[str, int, int], says: str) -> None:
    # imported in the worker that runs this, and not in all that collect it
    import torch.distributed as dist
    from torch import nn

    from ringtap.workload.torch_gradient_scheduler import TensorScheduler

    with pytest.raises(UsageError, match=says):
        TensorScheduler([nn.Linear(2, 2)], *arguments)
    assert not dist.is_initialized()


def test_gradients_on_accelerators_are_refused() -> None:
    from torch import nn

    from ringtap.workload.torch_gradient_scheduler import TensorScheduler

    with pytest.raises(UsageError, match="gradients on meta cannot be ordered"):
        TensorScheduler([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")], "fifo")
