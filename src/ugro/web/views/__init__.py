"""What a page shows, computed from what the agent knows. No HTTP."""
