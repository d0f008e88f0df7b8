"""Adapts TensorFlow and both Keras generations to the framework."""
