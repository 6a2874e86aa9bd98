"""Which nodes go to sleep and which are woken."""
