"""Small broken tasks and configs, one mistake each, that `--mode=verify` must find and name."""
