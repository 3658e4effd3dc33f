"""Reading with Spark's `format("qb")`."""
