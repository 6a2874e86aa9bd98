"""What the trainings of recipes share; copied recipes import it."""
