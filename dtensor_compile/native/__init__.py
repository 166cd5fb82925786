"""The C++ part of a compiled call, and what loads it."""
