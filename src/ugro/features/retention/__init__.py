"""Which ended jobs and results are removed. Removes nothing that is still needed or kept."""
