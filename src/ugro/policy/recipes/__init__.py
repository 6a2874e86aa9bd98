"""Built-in training recipes: which one a model needs, and whether a training fits a device."""
