"""Equal modules are traced once: the trace of a call, the facts that it depends on, and its copies."""
