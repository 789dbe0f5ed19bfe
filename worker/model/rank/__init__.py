"""The process of a tensor-parallel rank above 0."""
