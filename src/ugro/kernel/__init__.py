"""What every feature stands on. It knows none of them, and imports no frame."""
