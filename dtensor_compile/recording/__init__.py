"""What happens while programs compile, collected for reports."""
