"""The work that people have, at default settings, beside Redis Streams, JetStream and RabbitMQ."""
