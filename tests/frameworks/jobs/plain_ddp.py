"""A plain DistributedDataParallel loop with a learning-rate scheduler and clipped gradients."""

import gc
import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 4, (64,)))
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 4)), bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    if dist.get_rank() == 0:
        values = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        print("parameters", hashlib.sha256(values).hexdigest())
    del model  # before the group, whose threads may else outlive the interpreter and abort
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
