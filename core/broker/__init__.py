"""What every door calls: topics, appending, fetching, idempotent producers."""
