"""Peers that cannot be redirected: passed on by one broker, taken by another."""
