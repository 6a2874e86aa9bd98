"""The agent's side of nodes: ssh, the link, typed calls, reports, host keys. Does not place, start or end jobs."""
