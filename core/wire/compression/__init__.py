"""Compression of frames on their way, by zstd or lz4."""
