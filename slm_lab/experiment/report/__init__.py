"""Reports of run folders: reading of files, metrics, statistics, figures and HTML pages. The package also has the terminal output of runs."""
