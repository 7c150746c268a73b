"""PyTorch Lightning: one process, or two with the ddp strategy (the argument is the number)."""

import gc
import hashlib
import logging
import sys
import tempfile

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, wanted = batch
        return nn.functional.mse_loss(self.net(inputs), wanted)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        self.log("loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def main() -> None:
    devices = int(sys.argv[1])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.gettempdir(),
    )
    trainer.fit(model, DataLoader(data, 4, shuffle=True), DataLoader(data, 16))
    if trainer.is_global_zero:
        values = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        print("parameters", hashlib.sha256(values).hexdigest(), "steps", trainer.global_step)
    if dist.is_initialized():
        # Lightning leaves the group to the interpreter's end, where its threads abort the process at times.
        del model, trainer
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
