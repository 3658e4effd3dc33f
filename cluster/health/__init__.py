"""How the NATS nodes keep the journal, as their leader and their monitors say."""
