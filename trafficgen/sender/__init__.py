"""The sender of a flow plan: launcher, workers and their connections."""
