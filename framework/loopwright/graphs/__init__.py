"""What tracing leaves to the framework: AutoGraph, random numbers, state of replicas."""
