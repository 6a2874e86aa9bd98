"""Small runs that share one supervising process."""
