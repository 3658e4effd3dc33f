"""The connection of a blocking client: its states, its sockets, and the thread that keeps it up."""
