"""`Lock` and `Hold`: acquiring, waiting, renewing, releasing and losing, on any backend."""
