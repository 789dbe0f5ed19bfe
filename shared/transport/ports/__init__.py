"""What api and worker may ask of a transport."""
