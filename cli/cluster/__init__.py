"""Commands about a cluster of brokers."""
