"""Damage to data directories: what is found, what is refused, and that nothing is silent."""
