"""Where trainings already log: their figures become metrics of the run. Each is imported only when asked for."""
