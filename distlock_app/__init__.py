"""Locks and data integrity for Django code that runs in more than one process."""

__version__ = "0.1.0"
