"""Batches of examples as arrays: what a caller of `ragged.vmap` holds."""
