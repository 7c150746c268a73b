"""Hogwild: processes that train one model in shared memory, each at its own pace, without a process group."""

import time

import torch
from torch import multiprocessing, nn


def train(number: int, model: nn.Module) -> None:
    torch.manual_seed(number)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(100 - 20 * number):
        optimizer.zero_grad()
        model(torch.randn(8, 50)).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.02)


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    shared = nn.Linear(50, 10)
    shared.share_memory()
    processes = [context.Process(target=train, args=(number, shared)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
