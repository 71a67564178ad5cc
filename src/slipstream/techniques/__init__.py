"""Every way to make a workload cheaper; found through the registry in `slipstream.technique`."""
