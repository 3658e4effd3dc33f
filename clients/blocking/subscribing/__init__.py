"""Subscriptions that a blocking client has joined: handlers, their threads, and what is sent to the broker."""
