"""How a YAML file of a user is read: plain values only, nothing said twice, and no file that could exhaust memory."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from ppas_core.errors import InvalidInput

MAX_BYTES: Final = 2**20
MAX_VALUES: Final = 100_000
"""Values of a file with every alias written out."""
MAX_DEPTH: Final = 64
_TAG: Final = "tag:yaml.org,2002:"
_PLAIN: Final = {_TAG + kind for kind in ["null", "bool", "int", "float", "str", "timestamp", "seq", "map", "merge"]}
_MAX_NUMBER: Final = 400
"""Characters of a number."""


def read_yaml(path: Path) -> Any:
    """The plain values in the YAML file `path`.

    Raises FileNotFoundError, so that a caller can say what such a file is; InvalidInput for everything else.
    """
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The UTF-8 text in `path`, at most MAX_BYTES. Raises FileNotFoundError; InvalidInput for everything else."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidInput(f"{path}: is larger than {MAX_BYTES} bytes; is it the right file?")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: cannot be read: byte {error.start} is not UTF-8 text") from None
    except ValueError as error:  # a zero byte, or half a character
        raise InvalidInput(f"{str(path)!r}: is no file name: {error}") from None


def parse_yaml(text: str, where: str) -> Any:
    """The plain values in YAML `text`. Raises InvalidInput with `where` and, where it is known, the line."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise InvalidInput(f"{where}: is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise InvalidInput(f"{where}: nests too deeply; at most {MAX_DEPTH} levels are read") from None
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"{where}: is not YAML: {error}") from None


class _Loader(yaml.SafeLoader):
    """The safe loader, which looks at the nodes before it makes values of them."""

    def get_single_data(self) -> Any:
        """The document's value; None for an empty file."""
        node = self.get_single_node()
        if node is None:
            return None
        self._known: dict[int, tuple[int, int]] = {}
        self._check(node, 1)
        return self.construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As inherited, with the line in every error."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            raise _problem(str(error), node) from None

    def _check(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        """(values, levels) at and below `node` with every alias written out, all of it checked."""
        if node.tag not in _PLAIN:
            raise _problem(f"the tag {node.tag!r}; only plain values are read: text, numbers, lists, mappings", node)
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
            return 1, 1
        if (known := self._known.get(id(node))) is None:
            if depth > MAX_DEPTH:
                raise _problem(f"nests deeper than {MAX_DEPTH} levels", node)
            self._known[id(node)] = (0, 0)
            if isinstance(node, yaml.MappingNode):
                self._refuse_double_keys(node)
                parts = [part for pair in node.value for part in pair]
            else:
                parts = node.value
            found = [self._check(part, depth + 1) for part in parts]
            known = 1 + sum(size for size, _ in found), 1 + max((levels for _, levels in found), default=0)
            self._known[id(node)] = known
        size, levels = known
        if size == 0:
            raise _problem("holds itself", node)
        if size > MAX_VALUES:
            raise _problem(f"holds more than {MAX_VALUES} values with its aliases written out", node)
        if depth + levels - 1 > MAX_DEPTH:
            raise _problem(f"nests deeper than {MAX_DEPTH} levels with its aliases written out", node)
        return known

    def _refuse_double_keys(self, node: yaml.MappingNode) -> None:
        seen: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
                continue
            self._check(key, 1)
            value = self.construct_object(key)
            line = key.start_mark.line + 1
            if value in seen:
                raise _problem(f"the key {key.value!r} stands there twice (first in line {seen[value]})", key)
            seen[value] = line


def _check_scalar(node: yaml.ScalarNode) -> None:
    if node.tag.endswith((":int", ":float")) and len(node.value) > _MAX_NUMBER:
        raise _problem(f"a number of {len(node.value)} characters; at most {_MAX_NUMBER} are read", node)
    if not node.value.isascii() and any("\ud800" <= character <= "\udfff" for character in node.value):
        raise _problem(f"{node.value!r} holds half a character (a lone surrogate)", node)


def _problem(text: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {node.start_mark.line + 1}: {text}")
