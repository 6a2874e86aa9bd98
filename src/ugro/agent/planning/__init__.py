"""The plan before a launch: trials as jobs, and the prediction that follows from them."""
