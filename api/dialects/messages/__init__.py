"""POST /v1/messages, Anthropic's dialect."""
