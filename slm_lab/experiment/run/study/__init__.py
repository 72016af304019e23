"""Studies: the runs of several specs, envs and seeds, and the files that they are compared by."""
