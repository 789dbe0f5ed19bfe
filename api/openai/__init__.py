"""The OpenAI dialects: schemas, parsing and conversion, pure functions of plain data."""
