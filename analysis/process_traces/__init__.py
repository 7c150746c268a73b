"""Reads what other tools recorded in processes of a job: PyTorch's profiler and flight recorder, NCCL Inspector."""
