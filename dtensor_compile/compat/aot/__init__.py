"""The private parts of AOTAutograd and of symbolic shapes that the package replaces or calls."""
