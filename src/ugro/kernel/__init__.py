"""What every feature stands on. It knows none of them."""
