"""Use of trained agents: load an agent, play or record episodes, and export its policy."""
