"""Speed against peers, side by side in one run: `python -m bench.speed`."""
