"""Code on a node, addressed by content: packs, trees, checkouts, garbage collection."""
