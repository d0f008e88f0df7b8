"""Which process this is, among which, and how they meet."""
