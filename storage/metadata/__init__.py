"""Small durable facts: a chained log of changes with snapshots, read from memory."""
