"""What a subscriber and a group member know and decide, without I/O."""
