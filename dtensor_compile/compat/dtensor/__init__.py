"""The private parts of DTensor that the package replaces or calls."""
