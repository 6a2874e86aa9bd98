"""Log files of any size, a page at a time."""
