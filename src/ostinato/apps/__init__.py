"""Whole programs built on the public API of ostinato."""
