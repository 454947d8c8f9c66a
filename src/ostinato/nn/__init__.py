"""Layers for other libraries: one module each, which imports that library."""
