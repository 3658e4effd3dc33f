"""Writing with Spark's `format("qb")`."""
