"""PyYAML's loader with YAML 1.2 scalars and without duplicate keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from yaml import SafeLoader as _Base
else:
    _Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is several times faster, where PyYAML was built with it

_SCALARS = [  # (tag, pattern, first characters): PyYAML's own follow YAML 1.1, where 1e-3 is a string, 1:30 is 90 and `no` is false
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
]


class Loader(_Base):
    """See the module."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # PyYAML's own shape


def _refuse_duplicates(root: yaml.Node) -> None:
    """Raise for a duplicate key in a mapping as written (one merged by `<<` may be overridden), or a key that is not a string."""
    waiting, met = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        below: list[yaml.Node] = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            _check_keys([key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"])
            below = [value for _, value in node.value]
        fresh = [child for child in below if id(child) not in met]
        met.update(id(child) for child in fresh)
        waiting.extend(fresh)


def _check_keys(keys: list[yaml.Node]) -> None:
    seen: set[str] = set()
    for key in keys:
        if key.tag != "tag:yaml.org,2002:str":
            raise yaml.constructor.ConstructorError(None, None, f"keys must be strings, not {key.value!r}", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key '{key.value}'", key.start_mark)
        seen.add(key.value)


def _construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 16 if text.startswith("0x") else 8 if text.startswith("0o") else 10)


def _construct_float(loader: Loader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).replace("_", ""))


for _tag, _pattern, _first in _SCALARS:
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def load(text: str) -> Any:
    """Parse a YAML text; raises yaml.YAMLError."""
    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _refuse_duplicates(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()
