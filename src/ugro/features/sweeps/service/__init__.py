"""The agent's side: a row for each sweep, its trials, and what they measured."""
