"""Models that exist only for the tests."""
