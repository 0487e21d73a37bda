"""flash-linear-attention on a CPU: its own functions where it is installed, stand-ins for them where it is not."""
