"""Services: what is to be done next for their replicas, their updates, and the door in front of them."""
