"""Read docstrings for the site's API reference: examples, arguments in groups, and `kernels.rung`.

An extension of Griffe, which reads the sources for mkdocstrings: mkdocs.yml names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import griffe

REREAD = {"minidist.kernels.rung": "minidist.kernels.rung()"}
EXAMPLE = re.compile(r"^>>> .*(?:\n.*\S.*)*", re.MULTILINE)
ARGUMENTS = re.compile(r"^Args:\n(?:(?: .*)?\n?)*", re.MULTILINE)
ENTRY = re.compile(r"^    ([*\w]+(?:, [*\w]+)*)(:.*(?:\n     .*)*)", re.MULTILINE)


SOURCE = (Path(__file__).parent / "api_examples.py").read_text()
PREAMBLE = SOURCE.partition("\n# minidist")[0] + "\n"
"""The imports that examples begin from."""


def examples() -> dict[str, str]:
    """The examples of docs/api_examples.py, by the path of the name that they are of."""
    parts = re.split(r"^# (minidist[.\w]+)\n", SOURCE, flags=re.MULTILINE)[1:]
    return {path: code.strip() for path, code in zip(parts[::2], parts[1::2], strict=True)}


class Reference(griffe.Extension):
    """Changes what Griffe has read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fence an example: in Markdown its `>>>` would make a quotation of a quotation of a quotation."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
        if obj.path == "minidist.kernels.rung" and obj.is_function:
            self.rung = obj

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Keep `kernels.rung` beside the module of the same name, which Griffe prefers; part arguments."""
        pkg["kernels"].set_member("rung()", self.rung)
        waiting: list[griffe.Object | griffe.Alias] = [pkg]
        while waiting:
            obj = waiting.pop()
            if obj.is_alias:
                continue
            for name, member in [*obj.members.items()]:
                if isinstance(member, griffe.Attribute) and str(member.value).startswith("delegated("):
                    obj.set_member(name, delegated(pkg, member, name))
            waiting += obj.members.values()
            if obj.docstring and (obj.is_function or obj.is_class):
                kinds = {each.name: each.kind and each.kind.value for each in obj.parameters}
                obj.docstring.value = parted(obj.docstring.value, kinds)
        for path, code in examples().items():
            obj = pkg[REREAD.get(path, path).removeprefix("minidist.")]
            while obj.is_alias:
                obj = obj.final_target
            text = f"\n\nExample, on two ranks:\n\n```python\n{code}\n```\n"
            if obj.docstring is None:
                obj.docstring = griffe.Docstring(text.strip(), parent=obj)
            else:
                obj.docstring.value += text


def delegated(pkg: griffe.Module, member: Any, name: str) -> griffe.Function:
    """The method that a face passes on: `step = delegated("shared", ShardedParameters.update)`."""
    path, _, method = member.value.arguments[1].canonical_path.rpartition(".")
    found = copy(pkg[path.removeprefix("minidist.")].all_members[method])
    while found.is_alias:
        found = copy(found.final_target)
    found.name, found.parent = name, member.parent
    found.parameters = griffe.Parameters(*[*found.parameters][1:])  # the first is the object itself
    return found


def parted(text: str, kinds: Mapping[str, str | None]) -> str:
    """A docstring with an entry for each argument: Griffe takes "a, b: ..." for one without a default.

    An argument that collects others is `*args` or `**kwargs` in the signature, which Griffe compares.
    """
    stars = {"variadic positional": "*", "variadic keyword": "**"}

    def entries(found: re.Match[str]) -> str:
        names = found[1].split(", ")
        return "\n".join(f"    {stars.get(kinds.get(name) or '', '')}{name}{found[2]}" for name in names)

    return ARGUMENTS.sub(lambda section: ENTRY.sub(entries, section[0]), text)
