"""What recipes share: files, flags, packing, scores, model cards."""
