"""What runs beside a job on a node, the hosts it can run on, and the sweep conductor."""
