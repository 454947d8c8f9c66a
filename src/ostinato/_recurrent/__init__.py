"""The generic recurrent operator, which runs any step function."""
