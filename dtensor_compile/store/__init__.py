"""Communication between ranks through the store of their process group."""
