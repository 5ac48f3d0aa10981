"""What type checkers make of a project that uses distlock_app; nothing here is run."""
