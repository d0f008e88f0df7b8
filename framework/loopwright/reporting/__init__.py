"""What a run reports: metrics, progress, summaries."""
