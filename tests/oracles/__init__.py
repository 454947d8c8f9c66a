"""What the library is compared with. Nothing here imports ostinato."""
