"""config.json and its neighbours, read strictly into shapes and constants."""
