"""Weights and calls of other libraries: one module per library, imported by name."""
