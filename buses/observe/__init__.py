"""What people see of a bus: tap, recordings, why, metrics and exports."""
