"""What the package replaces and calls of AOTAutograd and of symbolic sizes."""
