"""Reading and changing graphs: nodes, facts about them, their costs, copies, subgraphs."""
