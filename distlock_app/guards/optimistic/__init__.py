"""Optimistic locking: a save is refused if the row has changed since it was read."""
