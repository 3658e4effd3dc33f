"""Subscriptions that an async client has joined: handlers, their tasks, and what is sent to the broker."""
