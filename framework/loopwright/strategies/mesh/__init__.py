"""One model, split over a mesh of devices by TensorFlow's DTensor."""
