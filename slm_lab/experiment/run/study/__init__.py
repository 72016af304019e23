"""Studies: runs of several specs, envs and seeds, and the files to compare them."""
