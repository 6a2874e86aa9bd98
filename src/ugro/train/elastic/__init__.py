"""A rank drops out and the others go on; a rank that is started again joins them."""
