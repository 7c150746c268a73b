"""Holds the sweep plan: its reader, and the readers of its hosts, training jobs, collectives and jobs that share."""
