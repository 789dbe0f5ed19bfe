"""One step: a scheduled batch becomes tensors, hidden states, sampled tokens."""
