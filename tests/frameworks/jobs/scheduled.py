"""A model trained with all-reduced gradients, then by each method of the scheduler; and the order of its messages."""

import json
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn

from ringtap.workload.torch_gradient_scheduler import TensorScheduler

METHODS = [("fifo", 0, 0), ("tic", 0, 0), ("tac", 0, 0), ("p3", 400, 0), ("bytescheduler", 1000, 3000)]


def made() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 31), nn.Tanh(), nn.Linear(31, 1))


def step(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None


def train(model: nn.Sequential, scheduler: TensorScheduler | None) -> torch.Tensor:
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]

    def update(number: int) -> None:
        if scheduler.wait(number) is not None:
            step(layers[number])

    if scheduler:
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda _, __, number=number: update(number))
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(8):
        (model(torch.randn(16, 20)) - 1).square().mean().backward()
        if scheduler is None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            for layer in layers:
                step(layer)
    if scheduler:
        for number in range(len(layers)):
            update(number)
        scheduler.finish()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def messages(method: str, piece_bytes: int) -> list[int]:
    """Elements of the messages of an iteration; the first one lasts while the other layers' gradients get ready."""
    model, found, began, ended = made(), [], threading.Event(), threading.Event()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    scheduler, reduce = TensorScheduler(layers, method, piece_bytes), dist.all_reduce

    def logged(data: torch.Tensor, **words: bool) -> object:
        found.append(data.numel())
        began.set()
        ended.wait()
        return reduce(data, **words)

    dist.all_reduce = logged
    hidden = model[:4](torch.randn(16, 20))
    hidden.register_hook(lambda _: None if began.wait(60) else sys.exit("no message has begun"))
    model[4](hidden).square().mean().backward()
    ended.set()
    for number in range(len(layers)):
        scheduler.wait(number)
    scheduler.finish()
    dist.all_reduce = reduce
    return found


def main() -> None:
    dist.init_process_group("gloo")
    expected = train(made(), None)
    for name, piece_bytes, credit_bytes in METHODS:
        model = made()
        scheduler = TensorScheduler(
            [each for each in model if isinstance(each, nn.Linear)], name, piece_bytes, credit_bytes
        )
        difference = (train(model, scheduler) - expected).abs().max().item()
        found = {"method": name, "difference": difference}
        if name != "bytescheduler":
            found["messages"] = messages(name, piece_bytes)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
