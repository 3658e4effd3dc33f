"""Subscriptions that an async client has joined: handlers, their tasks, and what the broker is told."""
