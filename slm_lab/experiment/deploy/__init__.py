"""Use of a trained agent: load, enjoy, record and export it."""
