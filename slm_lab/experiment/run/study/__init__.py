"""Studies: runs of several specs, envs and seeds, and the files that compare these runs."""
