"""Workloads: collectives as message graphs."""
