"""DTensor's sharding rules: those that are missing, what they decide while tracing, and what is read off them."""
