"""What TensorFlow and both Kerases leave to the framework."""
