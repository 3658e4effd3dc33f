"""Carrying out what subscriptions decide: rounds, sinks, saved cursors, dead letters."""
