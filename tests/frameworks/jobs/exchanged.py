"""A model trained with DDP's own all-reduce, then with each algorithm of the arguments, from the same start."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringtap.workload.ddp_message_graph_exchange import exchange_gradients


def train(algorithm: str, counts: dict[str, int]) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(50, 200), nn.Tanh(), nn.Linear(200, 301), nn.Tanh(), nn.Linear(301, 1))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.1)
    if algorithm:
        exchange_gradients(model, algorithm, **counts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(100 + dist.get_rank())
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 50)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([weight.detach().flatten() for weight in model.parameters()])


def main() -> None:
    dist.init_process_group("gloo")
    own_losses, own = train("", {})
    for algorithm, counts in json.loads(sys.argv[1]):
        losses, weights = train(algorithm, counts)
        every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(every, weights)
        found = {
            "algorithm": algorithm,
            "loss": max(abs(one - other) for one, other in zip(losses, own_losses, strict=True)),
            "weights": (weights - own).abs().max().item(),
            "alike": all(torch.equal(weights, each) for each in every),
        }
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
