"""Many small items as batches: how large, to whom, what is sent again, and whether it pays to share them out."""
