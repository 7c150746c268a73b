"""Jobs of several training phases, each with a log of its own: what it did, in s, as JSON in ``own-<rank>.json``."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MS = 1e-3
own: dict[str, list[float]] = {}
parts = {"compute": 0.0, "optimizer": 0.0}
pauses_s: list[float] = []


class Loop:
    """Notes the ends of its iterations."""

    def __init__(self, name: str) -> None:
        self.ends_s = own.setdefault(name, [])

    def end(self) -> None:
        self.ends_s.append(time.monotonic())


def net(layers: int = 2, size: int = 64) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(layers)))


kept: list[nn.Module] = []  # a module of DDP that is taken down may hang


def ranks_of(model: nn.Module) -> DistributedDataParallel:
    kept.append(DistributedDataParallel(model))
    return kept[-1]


def timed(what: str, call):
    begin = time.monotonic()
    result = call()
    parts[what] += time.monotonic() - begin
    return result


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, loop: Loop, count: int, pause_s: float) -> None:
    inputs = torch.ones(8, 64)
    for _ in range(count):
        begin = time.monotonic()
        time.sleep(pause_s)
        pauses_s.append(time.monotonic() - begin)
        loss = timed("compute", lambda: model(inputs).square().mean())
        optimizer.zero_grad()
        timed("compute", loss.backward)
        timed("optimizer", optimizer.step)
        loop.end()


def epochs() -> None:
    model = net()
    for epoch in range(5):
        fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), Loop(f"epoch {epoch}"), 12, 10 * MS * (epoch + 1))


def folds() -> None:
    for fold in range(3):
        model = net()
        fit(model, torch.optim.Adam(model.parameters()), Loop(f"fold {fold}"), 10, 15 * MS)


def gan() -> None:
    critic, generator = net(), net(3)
    one, two = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    loop = Loop("round")
    for _ in range(10):
        fit(critic, one, Loop("critic"), 5, 8 * MS)
        fit(generator, two, Loop("generator"), 1, 8 * MS)
        loop.end()


def per_layer() -> None:
    """An optimizer per parameter that steps within the backward pass."""
    model = net(4)
    for weight in model.parameters():
        optimizer = torch.optim.SGD([weight], lr=1e-3)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)
    loop = Loop("loop")
    for _ in range(15):
        time.sleep(10 * MS)
        model(torch.ones(8, 64)).square().mean().backward()
        loop.end()


def replaced() -> None:
    """The same process begins anew, and hands on what it noted."""
    own.update(json.loads(os.environ.get("NOTED", "{}")))
    model = net()
    fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), Loop(f"start {len(own)}"), 12, 10 * MS)
    if len(own) < 3:
        os.environ["NOTED"] = json.dumps(own)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def fine_tuning() -> None:
    model = net()
    for weight in model[0].parameters():
        weight.requires_grad = False
    ranks = ranks_of(model)
    fit(ranks, torch.optim.SGD(model[1].parameters(), lr=1e-3), Loop("head"), 10, 20 * MS)
    for weight in model[0].parameters():
        weight.requires_grad = True
    ranks = ranks_of(model)
    fit(ranks, torch.optim.SGD(model.parameters(), lr=1e-3), Loop("all"), 20, 60 * MS)


def plain() -> None:
    model = ranks_of(net())
    fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), Loop("loop"), 20, 20 * MS * dist.get_world_size())


def elastic() -> None:
    """A rank that steps until its agent stops it, as another one joined; then 20 steps of both."""
    if dist.get_world_size() == 2:
        plain()
    model = ranks_of(net())
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), torch.ones(8, 64)
    note = b"|."  # of the first step
    with Path("steps-alone").open("ab", buffering=0) as file:
        while dist.get_world_size() == 1:
            model(inputs).square().mean().backward()
            optimizer.step()
            file.write(note)
            note = b"."
            time.sleep(20 * MS)


def helper() -> None:
    """Rank 0 starts a helper with more steps."""
    process = None
    if dist.get_rank() == 0:
        process = subprocess.Popen([sys.executable, sys.argv[0], "probe"])
    model = ranks_of(net())
    fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), Loop("loop"), 60, 40 * MS)
    if process is not None:
        assert process.wait() == 0


def probe() -> None:
    model = net()
    fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), Loop("probe"), 150, 4 * MS)


def closures() -> None:
    model = ranks_of(net(6, 256))
    inputs, loop = torch.ones(512, 256), Loop("loop")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = timed("compute", lambda: model(inputs)).square().mean()
        timed("compute", loss.backward)
        return loss

    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=4)
    for number in range(24):
        if number == 2:  # without the warm-up
            parts.update(compute=0.0)
        optimizer.step(closure)
        loop.end()


def accumulated() -> None:
    model = ranks_of(net(6, 256))
    optimizer, inputs, loop = torch.optim.SGD(model.parameters(), lr=1e-3), torch.ones(512, 256), Loop("loop")
    for number in range(24):
        if number == 2:
            parts.update(compute=0.0)
            pauses_s.clear()
        for micro in range(4):
            with model.no_sync() if micro < 3 else contextlib.nullcontext():
                outputs = [timed("compute", lambda: model(inputs)) for _ in range(2)]
                loss = (outputs[0] - 2 * outputs[1]).square().mean()
                begin = time.monotonic()
                time.sleep(3 * MS)
                pauses_s.append(time.monotonic() - begin)
                timed("compute", loss.backward)
        optimizer.step()
        optimizer.zero_grad()
        loop.end()


def loader() -> None:
    """Rank 1 loads its data for longer, and both load for much longer now and then."""
    model = ranks_of(net())
    optimizer, loop = torch.optim.SGD(model.parameters(), lr=1e-3), Loop("loop")
    for number in range(62):
        pause_s = 40 * MS * dist.get_rank() + 200 * MS * (number % 20 == 19)
        fit(model, optimizer, loop, 1, pause_s)


def before_group(rank: int, address: str) -> None:
    model = net()
    fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), Loop("alone"), 6, 5 * MS)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    ranks = ranks_of(model)
    fit(ranks, torch.optim.Adam(ranks.parameters()), Loop("together"), 20, 20 * MS)
    dist.destroy_process_group()
    fit(model, torch.optim.SGD(model.parameters(), lr=1e-3), Loop("after"), 6, 5 * MS)


def main() -> None:
    name = sys.argv[1]
    torch.set_num_threads(1)
    if name == "before_group":
        mp.spawn(before_group, (f"tcp://127.0.0.1:{sys.argv[2]}",), nprocs=2)
        return
    if "RANK" in os.environ and name != "probe":
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    globals()[name]()
    size = os.environ.get("WORLD_SIZE", "1")
    Path(f"own-{name}-{size}-{rank}.json").write_text(json.dumps({"ends_s": own, "parts": parts, "pauses_s": pauses_s}))
    if dist.is_initialized():
        # PyTorch's reducers and gloo's threads sometimes abort or hang as they are taken down, also without a recorder
        dist.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
