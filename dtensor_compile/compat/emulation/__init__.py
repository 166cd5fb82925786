"""An emulated GPU."""
