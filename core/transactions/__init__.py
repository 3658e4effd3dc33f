"""Messages that become visible as a whole or not at all, once."""
