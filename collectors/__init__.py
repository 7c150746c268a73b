"""Collects measurements on a node: one module per source, each with check, start, sample and stop."""
