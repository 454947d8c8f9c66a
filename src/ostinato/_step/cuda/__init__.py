"""Loops over steps without products, as generated kernels for NVIDIA GPUs."""
