"""The binary door: frames over TCP."""
