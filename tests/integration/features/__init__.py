"""Features as a whole: left out, and added by others."""
