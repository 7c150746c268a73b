"""Generates cross traffic: size distributions, flow plans, sender, receiver and the iperf3 driver."""
