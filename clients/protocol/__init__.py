"""The client's side of the protocol, without I/O."""
