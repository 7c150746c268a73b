"""Builds virtual testbeds: hosts and switches as network namespaces, with links of a known rate."""
