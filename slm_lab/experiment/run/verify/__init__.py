"""Train a part of a run again, and compare the rows and weights with those in the run folder."""
