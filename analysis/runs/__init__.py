"""Reads run directories: logs, steps, clocks, sockets, and growth over intervals."""
