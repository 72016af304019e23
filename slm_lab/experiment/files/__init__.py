"""Files on disk: the layout of run folders, tables, bundles (checkpoints), locks and remote storage."""
