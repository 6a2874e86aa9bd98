"""The agent's side of ``ugro.train``: headline, profile, energy. Does not influence a running training."""
