"""What is read off a graph and its simulated step: where the time goes, shown in many ways."""
