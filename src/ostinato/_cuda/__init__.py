"""Kernels for NVIDIA GPUs: their text, its compiler, its cache and its launches."""
