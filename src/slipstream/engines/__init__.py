"""Engines that run on many processes or machines."""
