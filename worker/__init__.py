"""The model side: engine, tensors, and the service that speaks to the queue. No web framework."""
