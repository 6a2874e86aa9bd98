"""What the standard library lacks: errors, JSON of dataclasses, quantities, asyncio helpers. Knows no noun of UGRO."""
