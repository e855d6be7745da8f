"""Modules that stand in for an implementation, each with its own fault. A testing process imports them by name."""
