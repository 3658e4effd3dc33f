"""The commands of `qb`, one module for each noun."""
