"""Values and conversions without a noun of their own: quantities, JSON, moments, secrets."""
