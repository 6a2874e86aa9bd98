"""Local SGD: each rank takes its own steps, and the ranks average their models in rounds of equal time."""
