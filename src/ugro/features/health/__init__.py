"""The health score of a node, and ``ugro doctor``. Does not poll: the kernel's reports are judged."""
