"""Exchange of gradients by the collective that ``RINGTAP_COLLECTIVE`` names, in each DDP model of the job.

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
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    import functools

    if module.__name__ == "torch.optim.optimizer":
        module.register_optimizer_step_pre_hook(functools.partial(_check, text))
        return
    ddp_class = module.DistributedDataParallel
    plain = ddp_class.__init__

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        try:
            _exchange(self, text)
        except Exception as error:
            _end(text, str(error) or type(error).__name__)

    ddp_class.__init__ = init


def _exchange(model: Any, text: str) -> None:
    from ringtap.workload.gradient_exchange import exchange_gradients

    global _made
    name, *numbers = text.split()
    exchange_gradients(model, name, **{key: int(value) for key, _, value in (word.partition("=") for word in numbers)})
    _made += 1


def _check(text: str, *_: Any) -> None:
    distributed = sys.modules.get("torch.distributed")
    if _made or distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() > 1:
        _end(text, "the job steps an optimizer before it has made a DistributedDataParallel model")


def _end(text: str, why: str) -> None:
    """End the process; the sentence also stands in the output of a job that catches SystemExit."""
    sys.stderr.write(f"ringtap: gradients cannot be exchanged as {VARIABLE}={text!r} asks: {' '.join(why.split())}\n")
    sys.stderr.flush()
    sys.exit(2)
