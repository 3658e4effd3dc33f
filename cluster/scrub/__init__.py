"""Proving the copies of a cell: of each NATS node, and of each broker."""
