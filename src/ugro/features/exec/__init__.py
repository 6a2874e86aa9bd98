"""``ugro exec``: one command on several nodes, now. Not a job: nothing is queued, collected or retried."""
