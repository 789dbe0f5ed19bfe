"""The description of the HTTP interface: GET /openapi.json, made of the code that serves it."""
