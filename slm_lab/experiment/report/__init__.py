"""Reports of run folders (reading of files, metrics, statistics, figures and HTML pages), and the terminal output of a run."""
