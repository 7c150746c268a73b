"""torch.compile: the model with the backend of the argument, then the optimizer's step and the whole iteration."""

import hashlib
import sys

import torch
from torch import nn


def main() -> None:
    backend = sys.argv[1]
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        compiled(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    @torch.compile(backend="aot_eager")
    def step() -> None:
        optimizer.step()

    @torch.compile(backend="aot_eager")
    def whole(inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        optimizer.zero_grad()
        compiled(torch.randn(4, 8)).square().mean().backward()
        step()
    for _ in range(3):
        whole(torch.randn(4, 8))
    values = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print("parameters", hashlib.sha256(values).hexdigest())
    from torch._dynamo.utils import counters

    print("graphs", counters["stats"]["unique_graphs"], "of", counters["stats"]["calls_captured"], "calls")


if __name__ == "__main__":
    main()
