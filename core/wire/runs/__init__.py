"""Runs of frames: many of them side by side in one buffer, proved and numbered together."""
