"""The partitions of a deployment, by the ports of one transport (docs/adr/0078)."""
