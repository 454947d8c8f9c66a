"""Primitives of ragged's own, and the public functions that bind them."""
