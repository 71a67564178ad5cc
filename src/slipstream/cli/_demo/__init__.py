"""What `slipstream demo` runs: a workload as a user would write it."""
