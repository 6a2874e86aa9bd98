"""The only owner of the state database."""
