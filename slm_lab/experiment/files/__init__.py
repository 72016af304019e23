"""Read and write the files of experiments: run folders, tables, checkpoints, locks and remote storage."""
