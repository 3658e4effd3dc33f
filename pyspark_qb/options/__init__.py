"""What a user of `format("qb")` can say, and what is said when it makes no sense."""
