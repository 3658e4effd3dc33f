"""A client of NATS: the protocol without I/O, and a shell on trio."""
