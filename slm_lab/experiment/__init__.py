"""Run experiments, trials and Sessions: the layer that manages files, processes and the terminal."""
