"""The workload of `slipstream demo`, written as a user would write it."""
