"""The fused recurrent operator."""
