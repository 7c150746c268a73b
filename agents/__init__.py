"""Agents that run beside a job on a node, the hosts that jobs run on, and the sweep conductor."""
