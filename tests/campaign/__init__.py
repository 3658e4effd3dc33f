"""Faults of real processes, for as long as one likes."""
