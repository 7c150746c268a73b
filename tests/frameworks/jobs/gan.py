"""Two optimizers with different numbers of backward passes, an LBFGS with its closure, activation checkpoints."""

import hashlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def main() -> None:
    torch.manual_seed(4)
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2)
    critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    for number in range(6):
        critic_optimizer.zero_grad()
        fake = generator(torch.randn(4, 4)).detach()
        (-critic(torch.randn(4, 8)).mean()).backward()
        critic(fake).mean().backward()
        critic_optimizer.step()
        if number % 2:
            generator_optimizer.zero_grad()
            (-critic(generator(torch.randn(4, 4))).mean()).backward()
            generator_optimizer.step()

    fit = nn.Linear(4, 1)
    lbfgs = torch.optim.LBFGS(fit.parameters(), lr=0.5, max_iter=4)
    inputs, wanted = torch.randn(16, 4), torch.randn(16, 1)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = nn.functional.mse_loss(fit(inputs), wanted)
        loss.backward()
        return loss

    for _ in range(3):
        lbfgs.step(closure)
    evaluations = next(iter(lbfgs.state.values()))["func_evals"]

    deep = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    last = torch.optim.SGD(deep.parameters(), lr=0.1)
    for reentrant in (True, False):  # a reentrant checkpoint runs a backward pass within the backward pass
        last.zero_grad()
        checkpoint(deep, torch.randn(2, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()
        last.step()
    weights = [weight for model in (generator, critic, fit, deep) for weight in model.parameters()]
    values = b"".join(weight.detach().numpy().tobytes() for weight in weights)
    print("parameters", hashlib.sha256(values).hexdigest())
    print("evaluations", evaluations)


if __name__ == "__main__":
    main()
