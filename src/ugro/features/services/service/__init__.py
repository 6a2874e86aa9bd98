"""The agent's side: a row and jobs for each service."""
