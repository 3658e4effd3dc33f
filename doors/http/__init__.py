"""The HTTP door: JSON over HTTP, Server-Sent Events, metrics, the live page."""
