"""Metrics from and to other systems: TensorBoard, W&B, InfluxDB, OTLP. Does not store metrics itself."""
