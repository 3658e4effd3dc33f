"""The blocking client: threads."""
