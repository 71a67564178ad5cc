"""Firmware for microcontrollers against its bars."""
