"""One totally ordered journal with one writer at a time."""
