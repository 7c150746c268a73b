"""Mixed precision whose loss scaler skips two of eight steps: itself, then within the optimizer's fused kernel."""

import hashlib

import torch
from torch import nn


def train(optimizer_class: type, **options: object) -> None:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(8):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 8)).square().mean()
        if number in (2, 5):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    values = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print("parameters", hashlib.sha256(values).hexdigest(), "scale", scaler.get_scale())


def main() -> None:
    train(torch.optim.SGD)
    train(torch.optim.Adam, fused=True)
    # A scaler that is switched off lets every step through.
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()
