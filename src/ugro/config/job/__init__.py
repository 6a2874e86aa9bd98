"""The job file: its schema, flags, errors, reference and export."""
