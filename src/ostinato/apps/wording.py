"""Words that the reports of commands and runs have in common."""


def counted(count: float, what: str) -> str:
    """Return a number of things, such as `1 row`, `1,000 rows` or `0.5 minutes`."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {what}{'' if count == 1 else 's'}"
