"""How loops and groups of examples are laid out: packed scan, padded scan, tiers."""
