"""Commands about Python environments: ``ugro env`` and ``ugro node setup``."""
