"""Weights and calls of other libraries: one module for each, imported by name."""
