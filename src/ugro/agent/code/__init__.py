"""The user's code: scan, hash, store snapshots, send what nodes lack."""
