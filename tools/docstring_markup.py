"""Let the documentation understand what our docstrings contain besides Markdown.

mkdocs.yml names this file as an extension of griffe, which reads the docstrings. Equations
(`:math:` and `.. math::`) become MathML, which browsers draw without a script; references such as
`:meth:` become code; examples that stand without a heading become code blocks.
"""

import re
from typing import Any

import griffe
from latex2mathml.converter import convert

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?([^`]+)`")
INLINE_MATH = re.compile(r":math:`([^`]+)`")
BLOCK_MATH = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +.*|\n *(?=\n\1 +))*)", re.M)
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*(?:\n\n>>> .*(?:\n.+)*)*", re.M)


def to_markdown(docstring: str) -> str:
    """Translate one docstring, which has lost its indentation."""
    text = BLOCK_MATH.sub(lambda m: m[1] + convert(_one_line(m[2]), display="block"), docstring)
    # In a span, because Markdown takes a line that starts with <math> for a paragraph of its own.
    text = INLINE_MATH.sub(lambda m: f"<span>{convert(_one_line(m[1]))}</span>", text)
    text = ROLE.sub(lambda m: f"`{m[1].rsplit('.')[-1]}`", text)
    return EXAMPLE.sub(lambda m: f"```pycon\n{m[0]}\n```", text)


def _one_line(equation: str) -> str:
    return " ".join(equation.split())


class DocstringMarkup(griffe.Extension):
    """Translate every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for everything that it has loaded."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
