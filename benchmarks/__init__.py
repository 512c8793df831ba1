"""Measurements: one question a script, one clock for all. See README.md."""
