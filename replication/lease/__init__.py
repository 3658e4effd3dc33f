"""The lease: which broker may answer for a cell."""
