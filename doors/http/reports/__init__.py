"""What the broker reports of itself: topics, messages, metrics, as this door shows them."""
