"""The producer of a client: its buffer, and the task that sends."""
