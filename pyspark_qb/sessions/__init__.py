"""Spark sessions that can run `format("qb")`."""
