"""Eight small tasks on real data, one a file, with targets frozen by recorded reference runs."""
