"""The trainings themselves: scripts to run or to copy."""
