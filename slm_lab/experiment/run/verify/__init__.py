"""Train a part of a run again and compare rows and weights with those in its folder."""
