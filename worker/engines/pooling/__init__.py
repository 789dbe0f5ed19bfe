"""Models that return a vector of a text: encoders, and decoders with pooling."""
