"""Reports of run folders: the reader, metrics, statistics, figures, pages; and what a run shows on the screen."""
