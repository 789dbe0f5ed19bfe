"""Files: content on a shared disk, records in Redis, and their routes."""
