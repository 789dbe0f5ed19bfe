"""The model side: engine, tensors, and the service that serves the queue. No web framework."""
