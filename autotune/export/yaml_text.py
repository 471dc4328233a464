"""YAML that every reader takes alike: quoted where some reader would see a number or a switch, and without anchors."""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

_SAFE_PLAIN: Final = re.compile(r"(--?)?[A-Za-z/][\x21-\x7e]+( [\x21-\x7e]+)*")
"""A text that no reader of YAML takes for a number or a switch; the rest is quoted, where it is one line."""


def yaml_text(body: dict[str, Any]) -> str:
    """`body`, plain values, as YAML in its own order."""
    text: str = yaml.dump(body, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
    return text


class _Plain(yaml.SafeDumper):
    """Writes a text of several lines as a block, and no anchors: what repeats is written again."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _SAFE_PLAIN.fullmatch(text) else '"'
    if "\n" in text and all(character.isprintable() or character == "\n" for character in text):
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _text)
