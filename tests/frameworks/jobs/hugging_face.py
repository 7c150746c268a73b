"""Hugging Face Trainer with gradient accumulation: a tiny GPT-2 made on the spot."""

import gc
import hashlib
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 64, (48, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[place], "labels": self.tokens[place]}


def main() -> None:
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=7,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    if trainer.is_world_process_zero():
        values = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        print("parameters", hashlib.sha256(values).hexdigest(), "steps", trainer.state.global_step)
    if dist.is_initialized():
        # The Trainer leaves the group to the interpreter's end, where its threads abort the process at times.
        del model, trainer
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
