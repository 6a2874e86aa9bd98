"""`ugro top`: the live view of the cluster in a terminal."""
