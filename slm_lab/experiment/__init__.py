"""Experiment → Trial → Session: the room that owns files, processes and the user's screen."""
