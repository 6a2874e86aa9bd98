"""What is measured, and who is told: the metric store, the collector, Prometheus' text, notifications."""
