"""What the package replaces and calls of DTensor."""
