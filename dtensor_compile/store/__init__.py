"""What ranks tell each other through the store of their process group."""
