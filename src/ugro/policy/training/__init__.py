"""Where a training's time goes, and what to do about it."""
