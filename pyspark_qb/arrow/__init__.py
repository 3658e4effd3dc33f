"""Messages as Arrow columns, in both directions."""
