"""Whole brokers in one process, on a clock, a disk, a network, threads and chance that a seed decides."""
