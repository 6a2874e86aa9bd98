"""Operations: one typed request for each, and what follows from it. It does not know what any of them does."""
