"""Read run folders, compute metrics and statistics, draw figures, write HTML reports, and display the progress of runs in the terminal."""
