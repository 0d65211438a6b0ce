"""Pulse: finds what makes a running training job slow, from the outside."""

__version__ = "0.1.0"
