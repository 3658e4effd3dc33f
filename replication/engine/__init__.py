"""A data directory that follows a cell's journal, and may own it."""
