"""What users switch on and off: one folder each, with the same floor plan.

The kernel and the frames know none of them.
"""
