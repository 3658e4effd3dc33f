"""One partition: segments, sealed batches, indexes, recovery, retention."""
