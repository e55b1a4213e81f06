"""Joins several processes into one program: detection, roll call, watchdog."""
