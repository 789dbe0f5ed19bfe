"""The engine of PENSTOCK_ENGINE=http: another inference server computes, this process relays."""
