"""The options of a run, and how an option is declared."""
