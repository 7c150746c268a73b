"""The virtual testbed: hosts and a switch as network namespaces, links of a known rate."""
