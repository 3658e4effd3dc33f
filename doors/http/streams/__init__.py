"""Answers that go on: Server-Sent Events of subscriptions and of topics."""
