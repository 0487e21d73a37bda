"""flash-linear-attention's functions, under its own signatures, on a CPU."""
