"""A GPU that is not there."""
