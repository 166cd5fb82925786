"""What the package replaces and calls of ``torch.distributed``: groups, meshes, wrappers."""
