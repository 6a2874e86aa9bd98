"""Code by content hash: scanned here, kept, sent as far as nodes lack it."""
