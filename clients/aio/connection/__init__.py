"""The connection of an async client: its stream, and the task that keeps it up."""
