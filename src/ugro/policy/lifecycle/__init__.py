"""What happens to an attempt next: retry, back off, explain a failure."""
