"""Step programs: what the native loop runs at each step, made from a jaxpr."""
