"""Schedules the gradients of a data-parallel job: runs the orders of `ringtap.workload.transfer_order_times`.

Gradients are all-reduced by a thread of its own, in pieces, by priority, with a limit of the bytes in flight. A layer's
forward pass waits for its own gradient only, as in P3 (MLSys'19) and ByteScheduler (SOSP'19). All ranks must begin
their all-reduces in the same order: rank 0 chooses, and announces each piece to the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringtap.core.errors import UsageError
from ringtap.workload.transfer_order_times import METHODS

_END = -1  # announced after the last piece
_AHEAD = 16  # announcements for which other ranks have posted receives


class _Piece(NamedTuple):
    """Part of a layer's gradient that one all-reduce carries."""

    layer: int
    begin: int
    end: int


class _Announcements:
    """Numbers that rank 0 sends to all others.

    Receives are posted ahead. Gloo begins to send when the receiver is known to be ready, and that notice would wait
    behind the bytes that the link has queued.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._others = range(1, dist.get_world_size())
        self._pending: deque[tuple[Any, list[Any]]] = deque()
        if dist.get_rank():
            for _ in range(_AHEAD):
                self._post()

    def send(self, number: int) -> None:
        data = torch.tensor([number])
        self._pending.append((data, [dist.isend(data, other, group=self._group) for other in self._others]))
        if len(self._pending) > _AHEAD:
            self._oldest()

    def end(self) -> None:
        """Announce the end, on rank 0: once per receive that is posted."""
        for _ in range(_AHEAD):
            self.send(_END)
        while self._pending:
            self._oldest()

    def receive(self) -> int:
        """Return the next number, on another rank."""
        number = self._oldest()
        if number != _END:
            self._post()
        else:
            while self._pending:
                self._oldest()
        return number

    def _post(self) -> None:
        data = torch.zeros(1, dtype=torch.int64)
        self._pending.append((data, [dist.irecv(data, 0, group=self._group)]))

    def _oldest(self) -> int:
        data, works = self._pending.popleft()
        for work in works:
            work.wait()
        return int(data)


class TensorScheduler:
    """Exchange of the gradients of a model's layers by priority.

    Call it before each layer's forward pass, and `finish` after the last iteration. Gradients are averaged; `update`
    is then called per layer instead of an optimizer's step.

    Args:
        layers: modules in the order of the forward pass; their parameters are on the CPU and of one type each.
        method: a name of `ringtap.workload.transfer_order_times.METHODS`. In a chain of layers, TIC and TAC both order
            whole tensors by layer.
        piece_bytes: bytes of a message at most, of P3 and ByteScheduler.
        credit_bytes: bytes in flight, of ByteScheduler; 0: one message at a time.

    Raises:
        UsageError: the method is unknown, has no pieces or no credit, or a layer is not on the CPU.
    """

    def __init__(self, layers: Sequence[Any], method: str, piece_bytes: int = 0, credit_bytes: int = 0) -> None:
        if method not in METHODS:
            raise UsageError(f"the method {method!r} is unknown: choose {', '.join(METHODS)}")
        if (piece_bytes > 0) != (method in METHODS[3:]) or (credit_bytes and method != METHODS[4]):
            raise UsageError(f"{method}: P3 and ByteScheduler need the size of pieces, ByteScheduler may have a credit")
        self._parameters = [list(layer.parameters()) for layer in layers]
        devices = {each.device for group in self._parameters for each in group if each.device.type != "cpu"}
        if devices:  # where work is queued, a thread does not see when a gradient is there
            raise UsageError(f"gradients on {devices.pop()} cannot be ordered: only those of layers on the CPU")
        self._flat = [torch.cat([each.detach().reshape(-1) for each in group]) for group in self._parameters]
        self._credit_bytes, self._world_size = credit_bytes, dist.get_world_size()
        order = range(len(layers))
        self._priority = list(reversed(order)) if method == METHODS[0] else list(order)
        self._pieces = [
            _Piece(layer, begin, min(begin + size, len(flat)))
            for layer, flat in enumerate(self._flat)
            for size in [max(piece_bytes // flat.element_size(), 1) if piece_bytes else len(flat)]
            for begin in range(0, len(flat), size)
        ]
        self._pieces_of = [[i for i, each in enumerate(self._pieces) if each.layer == layer] for layer in order]
        self._changed = threading.Condition()
        self._accumulated, self._left = [0] * len(layers), [0] * len(layers)
        self._reduced_s: list[float | None] = [None] * len(layers)
        self._ready: list[tuple[int, int]] = []  # priority and number of pieces that wait
        self._flying_bytes, self._announced_end = 0, False
        self._error: BaseException | None = None
        self._works: SimpleQueue[tuple[Any, int] | None] = SimpleQueue()
        for layer, group in enumerate(self._parameters):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(lambda _, layer=layer: self._accumulate(layer))
        self._announcements = _Announcements()
        self._threads = [threading.Thread(target=self._guarded, args=(each,), daemon=True)
                         for each in (self._send, self._complete)]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def wait(self, layer: int) -> float | None:
        """Wait for the gradient of a layer, if it has one; its parameters' ``grad`` is then the mean of all ranks.

        Returns:
            The time (`time.monotonic`) since which the gradient is there; None: it has none since the last call.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._left[layer])
            if self._error:
                raise self._error
            since_s, self._reduced_s[layer] = self._reduced_s[layer], None
        if since_s is not None:
            self._flat[layer].div_(self._world_size)
            at = 0
            for parameter in self._parameters[layer]:
                parameter.grad = self._flat[layer][at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
        return since_s

    def finish(self) -> None:
        """End the threads, after `wait` for all layers."""
        with self._changed:
            self._announced_end = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _accumulate(self, layer: int) -> None:
        """Take a layer's gradient as soon as those of all its parameters are there."""
        self._accumulated[layer] += 1
        if self._accumulated[layer] < len(self._parameters[layer]):
            return
        self._accumulated[layer], at = 0, 0
        for parameter in self._parameters[layer]:
            self._flat[layer][at : at + parameter.numel()] = parameter.grad.reshape(-1)
            parameter.grad = None
            at += parameter.numel()
        with self._changed:
            self._left[layer] = len(self._pieces_of[layer])
            for number in self._pieces_of[layer]:
                heappush(self._ready, (self._priority.index(layer), number))
            self._changed.notify_all()

    def _guarded(self, work: Any) -> None:
        """Run a thread; its error is that of the job's next call."""
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
        finally:
            if work == self._send:
                self._works.put(None)

    def _next(self) -> int:
        """Return the piece that rank 0 sends next, as soon as there is one and the credit permits it."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    (self._ready and (not self._flying_bytes or self._flying_bytes < self._credit_bytes))
                    or (self._announced_end and not self._ready)
                    or self._error
                )
            )
            return heappop(self._ready)[1] if self._ready and not self._error else _END

    def _taken(self, piece: tuple[int, int]) -> bool:
        """Take an announced piece as soon as it is ready here, too; False after an error."""
        with self._changed:
            self._changed.wait_for(lambda: piece in self._ready or self._error)
            if self._error:
                return False
            self._ready.remove(piece)
        return True

    def _send(self) -> None:
        leads = dist.get_rank() == 0
        while (number := self._next() if leads else self._announcements.receive()) != _END:
            piece = self._pieces[number]
            if leads:
                self._announcements.send(number)
            elif not self._taken((self._priority.index(piece.layer), number)):
                return
            data = self._flat[piece.layer][piece.begin : piece.end]
            with self._changed:
                self._flying_bytes += data.nbytes
            self._works.put((dist.all_reduce(data, async_op=True), number))
        if leads:
            self._announcements.end()

    def _complete(self) -> None:
        while (item := self._works.get()) is not None:
            work, number = item
            work.wait()
            piece = self._pieces[number]
            with self._changed:
                self._flying_bytes -= (piece.end - piece.begin) * self._flat[piece.layer].element_size()
                self._left[piece.layer] -= 1
                self._reduced_s[piece.layer] = time.monotonic()
                self._changed.notify_all()
