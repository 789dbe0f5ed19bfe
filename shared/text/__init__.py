"""Text on both sides of the wire: tokenizer, incremental detokenizer, chat template. No torch."""
