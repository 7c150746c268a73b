"""Loader workers that are forked in the middle of training, schedulers, and a loop without an optimizer's step."""

import hashlib
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ringtap


def main() -> None:
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    data = TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
    loader = DataLoader(data, 8, shuffle=True, num_workers=2, multiprocessing_context="fork")
    for _ in range(3):
        for inputs, wanted in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), wanted)
            loss.backward()
            optimizer.step()
            warm_up.step()
        plateau.step(loss.detach())
    weights = list(model.parameters())
    for _ in range(4):
        gradients = torch.autograd.grad(model(data.tensors[0]).square().mean(), weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(0.1 * gradient)
        ringtap.step()
    print("parameters", hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in weights)).hexdigest())
    print("user", os.getuid())


if __name__ == "__main__":
    main()
