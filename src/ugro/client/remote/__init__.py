"""The client's way to an agent on another machine: ssh, a relay there, and many connections over the two."""
