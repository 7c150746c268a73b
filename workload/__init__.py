"""Models what jobs compute and send, as traces, and simulates it on networks."""
