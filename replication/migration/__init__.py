"""Moving a cell between a local data directory and a journal."""
