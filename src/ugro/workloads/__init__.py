"""What a job can be: each kind turns a spec and a placement into processes. Pure: the agent starts them."""
