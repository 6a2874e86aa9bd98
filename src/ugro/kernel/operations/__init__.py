"""Operations: one typed request for each, and what follows from it. Does not know what any of them does."""
