"""Rules that check whether the sections of a valid spec fit together, and functions that resolve a spec to the values that a run uses."""
