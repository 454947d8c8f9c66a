"""The oracles with which tests compare the library. None of them imports ostinato."""
