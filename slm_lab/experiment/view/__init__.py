"""Local page of the runs in a data folder: `slm-lab view`."""
