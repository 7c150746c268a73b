"""Rank of a small job that reduces its gradients by a double binary tree: ResNet-50 at 1:100, computation is sleep."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from ringtap.examples.scale_model import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_FIRST_BUCKET_BYTES,
    build_model,
    distribute,
    join_group,
    model_layers,
    train,
)
from ringtap.workload.ddp_message_graph_exchange import exchange_gradients

SCALE, COMPUTE_S, ITERATIONS = 100, 0.1, 20

if __name__ == "__main__":
    torch.set_num_threads(1)
    join_group()
    built = build_model(model_layers("resnet50", SCALE), COMPUTE_S, dist.get_rank())
    model = distribute(built, DEFAULT_BUCKET_BYTES // SCALE, DEFAULT_FIRST_BUCKET_BYTES // SCALE)
    exchange_gradients(model, "double-tree", pieces=2)
    train(model, ITERATIONS)
    del model
    gc.collect()
    dist.destroy_process_group()
