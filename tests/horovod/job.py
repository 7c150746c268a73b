"""A small Horovod training job as a user would write it; it knows nothing of ringtap.

python job.py STEPS [SECONDS A STEP]: the same data and start in every run; the last line is rank 0's result.
"""

import hashlib
import sys
import time

import horovod.torch as hvd
import torch


def main() -> None:
    steps = int(sys.argv[1])
    pause_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)), torch.nn.Linear(64, 1))
    plain = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.Generator().manual_seed(hvd.rank())
    losses = []
    for number in range(steps):
        inputs = torch.randn(32, 64, generator=data)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        if number % 2:  # as scripts do that clip gradients
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="loss").item())
        time.sleep(pause_s)
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
    if hvd.rank() == 0:
        print(f"losses {losses[0]!r} {losses[-1]!r} parameters {digest}", flush=True)


if __name__ == "__main__":
    main()
