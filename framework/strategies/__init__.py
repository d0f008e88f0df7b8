"""Where training runs, and how replicas and processes communicate."""
