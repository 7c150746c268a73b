"""DistributedDataParallel over torch.multiprocessing.spawn: ranks are given in code, and data comes from loaders."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def train(rank: int, options: argparse.Namespace) -> None:
    store = dist.TCPStore("127.0.0.1", options.port, options.ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(options.iterations, options.width), torch.randn(options.iterations, 1))
    net = nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU(), nn.Linear(options.width, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for inputs, labels in DataLoader(data, batch_size=1, num_workers=options.workers):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
        time.sleep(options.pause_s)
    if rank == 0:
        print("gradients", 4 * sum(weight.numel() for weight in net.parameters()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--width", type=int, default=700)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pause-s", type=float, default=0.05)
    given = parser.parse_args()
    multiprocessing.spawn(train, args=(given,), nprocs=given.ranks)
