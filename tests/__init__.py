"""The test suite: `sh tests/run.sh` runs it on every database, `python -m pytest` on SQLite."""
