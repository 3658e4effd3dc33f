"""Batches on their way to stable storage: commit steps, the sync, writer threads."""
