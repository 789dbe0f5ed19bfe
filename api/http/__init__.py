"""HTTP itself: the server, its bounds, middleware, JSON bodies. Knows no job."""
