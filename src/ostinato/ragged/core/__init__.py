"""The parts that rules build on: sizes, values, contexts, registry, interpreter."""
