"""The run folder, as every part of the framework and each tool knows it."""
