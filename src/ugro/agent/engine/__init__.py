"""Moves jobs from queued to finished: decide, launch, watch, retry, finish, clean up."""
