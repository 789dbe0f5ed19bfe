"""Health, models, tokenization and the pages."""
