"""The commands of README.md and docs/ that no test runs, with the reasons."""

LEFT_OUT = {
    "make *": "installs packages; tests read the Makefile only for the name of the target",
    "pip install *": "installs packages",
    "hf auth login": "asks for a token of the Hugging Face Hub",
    "* ray get-auth-token *": "starts a cluster of several machines; tests/experiment/cluster has one on this machine",
    "* ray start *": "starts a cluster of several machines; tests/experiment/cluster has one on this machine",
    "kubectl *": "needs Kubernetes",
    "podman *": "needs a container engine; make container runs the steps of Containerfile",
    "* --cluster auto *": "needs a running cluster; tests/experiment/cluster has one on this machine",
    "* python -m bench.speed*": "compares two checkouts for an hour",
    "python -m bench.speed*": "installs other libraries, and measures for hours",
}
"""Pattern of a command line → the reason why no test runs it."""
