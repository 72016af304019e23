"""Run experiments: trials, searches and studies."""
