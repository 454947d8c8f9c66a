"""Linear recurrences and what is built on them."""
