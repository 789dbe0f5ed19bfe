"""The Anthropic Messages dialect: schemas, conversion and shapes, pure functions of plain data."""
