"""Rules for Ray clusters: where workers go, what is to be done next, whether nodes agree, what users see."""
