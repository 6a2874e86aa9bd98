"""Machines that sleep while there is nothing to do, and are woken for jobs."""
