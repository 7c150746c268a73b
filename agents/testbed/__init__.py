"""Virtual testbed: hosts and a switch as network namespaces, with links of a known rate."""
