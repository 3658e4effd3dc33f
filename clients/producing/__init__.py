"""A producer without I/O: its options, the messages that it buffers, and the order in which they are sent."""
