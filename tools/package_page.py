"""Generate PYPI.md, the description of the package on a package index: README.md with links that work outside the repository.

A link to a file of the repository becomes an absolute link if pyproject.toml has the key project.urls.Repository, and plain text if not.
The parts of README.md between `<!-- checkout -->` and `<!-- end of checkout -->` are about the source code: the first part is replaced by
instructions to install the package, and the other parts are omitted. If links become plain text, the table of the documentation is omitted
too.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRANCH = "main"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")
_CHECKOUT = re.compile(r"<!-- checkout -->.*?<!-- end of checkout -->", re.DOTALL)
_COMMENT = re.compile(r"^<!-- .* -->\n\n?", re.MULTILINE)
_INSTALL = """\
```bash
pip install slm-lab
slm-lab demo.json ppo_cartpole train
```

The second command trains PPO on CartPole for 10–20 s, in two *sessions* (training runs with different seeds). A *frame*, below, is
one step of one environment. You need Python 3.11 or newer."""


def text() -> str:
    """Return the page."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    return page((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Repository"))


def page(readme: str, repository: str | None) -> str:
    """Convert the text of README.md to the text of the package page.

    Args: repository: URL of the repository to which links refer, or None to convert links to plain text.
    """

    def link(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if repository is None:
            return "" if image else label
        return f"{image}[{label}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/{BRANCH}/{target})"

    plain = _COMMENT.sub("", _CHECKOUT.sub("", _CHECKOUT.sub(_INSTALL, readme, count=1))).replace(".venv/bin/slm-lab", "slm-lab")
    if repository is None:
        plain = re.sub(r"^## Documentation\n.*?(?=^## )", "", plain, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(link, plain))
