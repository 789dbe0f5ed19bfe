"""The dashboard's live state of the deployment, read once for all viewers."""
