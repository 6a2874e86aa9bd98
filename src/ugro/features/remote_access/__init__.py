"""The agent from another machine: login, relay, and the files of that client. Opens no port."""
