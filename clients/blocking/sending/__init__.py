"""The producer of a client: its buffer, and the thread that sends."""
