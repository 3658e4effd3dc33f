"""What a request carries: its head checked, its body read within bounds, its refusal."""
