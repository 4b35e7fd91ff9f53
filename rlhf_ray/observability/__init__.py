"""What a run shows of itself: its directory, metrics and their sinks, busy time, progress, and the report."""
