"""Commands about what jobs made: results, compare, profile, notes."""
