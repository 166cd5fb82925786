"""Reading and changing graphs: nodes, what is known of them, what they cost, copies, graphs within graphs."""
