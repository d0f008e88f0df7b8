"""Updates: optimizers, loss scaling, schedules, averages, and undoing a bad step."""
