"""The private parts of Inductor and Triton that the package replaces or calls."""
