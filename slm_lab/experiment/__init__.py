"""Experiment → Trial → Session: the layer that owns files, processes and the terminal."""
