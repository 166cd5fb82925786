"""The C++ part of a compiled call, and its loader."""
