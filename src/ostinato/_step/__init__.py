"""The step compiler: loops over any step function, faster than `lax.scan`."""
