"""Compiled kernels of the capture scan."""
