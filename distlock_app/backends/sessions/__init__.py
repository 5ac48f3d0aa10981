"""Sessions of our own on a database server, for what ends with its connection."""
