"""The command `verify`: train a part of a run again, and compare the new rows and weights with those in the run folder."""
