"""What a subscription decides: plain state and a clock in, decisions out. No I/O."""
