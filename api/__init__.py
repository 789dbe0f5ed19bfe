"""The web side: HTTP in, jobs out, events back. Holds no model file and no tensor."""
