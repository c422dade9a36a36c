"""``hear metrics``: what passes on a bus, for Prometheus and OpenTelemetry, by a read-only tap."""
