"""`loopwright sweep my.gin --vary '...'`, by Optuna; docs/sweeps.md describes it."""
