"""Which collectives lead from one spec to another: integers and specs, no torch.fx."""
