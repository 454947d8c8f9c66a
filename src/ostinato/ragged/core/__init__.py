"""What every rule builds on: sizes, values, the context of a batch, the interpreter."""
