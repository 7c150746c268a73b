"""Makes flow plans: size distributions, kinds of traffic, and the plan file."""
