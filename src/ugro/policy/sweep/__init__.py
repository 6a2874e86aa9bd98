"""Sweeps: what a file or a command line searches, the next trial, which trials end early, which is the best."""
