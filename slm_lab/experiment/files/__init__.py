"""What is on disk: the layout of run folders, tables, bundles (checkpoints), locks and storage elsewhere."""
