"""Networks that evaluate forward passes, and their loading."""
