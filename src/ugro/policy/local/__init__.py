"""Local SGD: ranks that take their own steps and average their models in rounds of equal time."""
