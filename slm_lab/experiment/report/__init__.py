"""Reports of run folders: reading, metrics, statistics, figures and HTML pages; also the terminal output of a run."""
