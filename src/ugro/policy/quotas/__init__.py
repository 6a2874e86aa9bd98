"""What users and groups may have, what they have used, and whose turn it is."""
