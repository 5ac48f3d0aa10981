"""Models with a version, for the tests of the optimistic guard."""
