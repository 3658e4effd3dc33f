"""What commands share: what they are made of, what they read, and what they show."""
