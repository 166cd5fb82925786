"""What the package replaces and calls of Inductor and Triton."""
