"""flash-linear-attention on a CPU."""
