"""What the package replaces and calls of Dynamo."""
