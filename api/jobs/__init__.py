"""Jobs from admission to the last byte of their stream, and the routes that show them."""
