"""Complete programs that use the public API of ostinato alone."""
