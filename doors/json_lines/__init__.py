"""The JSON-lines door: one JSON object a line."""
