"""What both Kerases leave to the framework."""
