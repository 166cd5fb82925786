"""The private parts of ``torch.distributed`` that the package replaces or calls: groups, meshes, wrappers."""
