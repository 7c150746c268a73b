"""What the packets of a training job tell of its structure."""
