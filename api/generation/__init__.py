"""What all dialects share: models, prompts, sampling, structured output, choices."""
