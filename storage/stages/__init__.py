"""Messages of transactions that are durable and not yet visible."""
