"""Where a NaN or an infinity comes from, and the action that stops a run at it."""
