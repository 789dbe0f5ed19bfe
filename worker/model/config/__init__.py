"""What a checkpoint says of itself: config.json, read strictly."""
