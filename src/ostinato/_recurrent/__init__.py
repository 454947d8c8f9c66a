"""The generic recurrent operator: any step function, with chosen memory."""
