"""OpenAI's Responses dialect: items in, items out, and a stream that any frontend can repeat."""
