"""Services: a row and ordinary jobs, and the loop that brings them together."""
