"""`ugro demo`: a lab, a training on it, what balancing gained."""
