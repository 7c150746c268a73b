"""Records jobs on nodes and measures sweeps on hosts: supervisor, agent, hook, clocks, hosts, testbed, doctor."""
