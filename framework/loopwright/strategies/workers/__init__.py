"""Several workers that train in step: which process this is, among which, and how they meet."""
