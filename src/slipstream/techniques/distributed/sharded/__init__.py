"""Each replica updates its share of the parameters: ZeRO-1, weight-update sharding."""
