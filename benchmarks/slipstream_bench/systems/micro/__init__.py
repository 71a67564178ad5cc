"""Firmware for microcontrollers."""
