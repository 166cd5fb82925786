"""Specs and meshes as text that can be parsed: pure data."""
