"""The wire format and what all layers share: frames, errors, names. Imports nothing else of ours."""
