"""What both sides rest on: messages, text, transport. Knows neither web nor tensors."""
