"""Functions, views and management commands that run under a lock."""
