"""Plans of collectives from one spec to another: integers and specs, no torch.fx."""
