"""When each operator and each collective of a lowered graph runs."""
