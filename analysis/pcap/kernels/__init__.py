"""Holds the compiled kernels of the capture scan."""
