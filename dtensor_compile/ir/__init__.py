"""Specs and meshes as text that parses back: pure data."""
