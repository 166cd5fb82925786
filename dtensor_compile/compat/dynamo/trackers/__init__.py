"""Trackers of objects that Dynamo meets in a program, and what trackers need of Dynamo."""
