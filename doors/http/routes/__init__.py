"""The routes of the HTTP door, one module for each noun."""
