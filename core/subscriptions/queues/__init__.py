"""The order in which ready messages go out, by mode."""
