"""The client's side: connections through ssh, and what is sent of this machine's files."""
