"""What a run reports about itself: its directory, metrics and sinks, time per role, progress, and the report."""
