"""`compare RUN RUN …`: runs in one graph and one table."""

from __future__ import annotations

from argparse import Namespace

from slm_lab.cli.output import print_result


def compare(words: list[str], arguments: Namespace) -> int:
    """Compare runs; print the table."""
    from slm_lab.experiment.report.compare_report import compare as report

    by, metric, labels = arguments.by or "frame", arguments.metric or "total_reward", arguments.label or ()
    options = {"by": by, "metric": metric, "solve": arguments.solve, "labels": labels}
    return print_result(report(words, **options, data_dir=arguments.data_dir, out=arguments.out))
