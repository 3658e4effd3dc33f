"""What a client can do, by subject."""
