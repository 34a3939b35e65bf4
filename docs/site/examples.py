"""Docstrings say `Example:`; griffe, which reads them for the reference, knows a section `Examples:` only."""

import re

import griffe

_HEADING = re.compile(r"^( *)Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """Gives the section the name that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **arguments: object) -> None:
        """Renames it in the docstring of each object."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
