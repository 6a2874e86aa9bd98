"""Which job starts where, and why the others wait."""
