"""Actions that send a run's metrics, pictures and export to an experiment tracker."""
