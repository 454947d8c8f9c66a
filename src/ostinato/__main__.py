"""`python -m ostinato`: the same as the command `ostinato`."""

from .cli import main

main()
