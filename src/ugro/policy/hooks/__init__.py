"""When hooks are called."""
