"""Requests about jobs: submit, dry run, cancel, retry, results, the result cache, retention."""
