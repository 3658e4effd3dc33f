"""Subscriptions that a blocking client has joined: handlers, their threads, and what the broker is told."""
