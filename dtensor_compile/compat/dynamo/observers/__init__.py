"""What Dynamo does, observed: compilations and their cost, graph breaks, phases, names of modules."""
