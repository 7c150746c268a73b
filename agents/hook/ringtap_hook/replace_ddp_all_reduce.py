"""Exchanges gradients by the collective that ``RINGTAP_COLLECTIVE`` names, in each DDP model of the job.

The variable holds an algorithm and its numbers: ``double-tree``, or ``hierarchical group=2 pieces=1``. A job that
cannot exchange in this way ends with one sentence: under another collective, it would be measured under a wrong name.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .settings import Settings

VARIABLE = "RINGTAP_COLLECTIVE"
_made = 0  # models of this process that exchange in this way


def attach(module: ModuleType, settings: Settings) -> None:  # noqa: ARG001
    """Exchange the gradients of each DDP model that this process makes; check at the first step that there is one."""
    if not os.environ.get(VARIABLE):
        return
    import functools

    if module.__name__ == "torch.optim.optimizer":
        module.register_optimizer_step_pre_hook(_check)
        return
    ddp_class = module.DistributedDataParallel
    plain = ddp_class.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        try:
            _exchange(self)
        except Exception as error:
            _end(str(error) or type(error).__name__)

    ddp_class.__init__ = init


def _exchange(model: Any) -> None:
    global _made
    name, *words = os.environ[VARIABLE].split()
    numbers = {key: value for key, _, value in (word.partition("=") for word in words)}
    if not numbers.keys() <= {"group", "shards", "pieces"} or not all(value.isdigit() for value in numbers.values()):
        raise ValueError("behind the algorithm, only group=G, shards=K and pieces=P are known")
    from importlib import import_module

    exchange = import_module("ringtap.workload.ddp_message_graph_exchange")  # of the job's Python, only now
    exchange.exchange_gradients(model, name, **{key: int(value) for key, value in numbers.items()})
    _made += 1


def _check(*_: Any) -> None:
    distributed = sys.modules.get("torch.distributed")
    if _made or distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() > 1:
        _end("the job steps an optimizer before it has made a DistributedDataParallel model")


def _end(why: str) -> None:
    """End the process; the sentence also stands in the output of a job that catches SystemExit."""
    asked, why = repr(os.environ[VARIABLE]), " ".join(why.split())
    sys.stderr.write(f"ringtap: gradients cannot be exchanged as {VARIABLE}={asked} asks: {why}\n")
    sys.stderr.flush()
    sys.exit(2)
