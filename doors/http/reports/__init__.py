"""What the broker tells of itself: topics, messages, metrics, as this door shows them."""
