"""What happens around a compiled graph when it runs, and just before it does for the first time."""
