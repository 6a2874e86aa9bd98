"""Calls of addresses and commands when something happens."""
