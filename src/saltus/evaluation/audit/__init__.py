"""Compare what two servers, or one server with and without speculation, give their users."""
