"""Tests of the journal, the NATS client and the lease."""
