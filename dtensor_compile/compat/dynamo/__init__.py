"""The private parts of Dynamo that the package replaces or calls."""
