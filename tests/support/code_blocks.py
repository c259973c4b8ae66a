"""The code blocks of the documentation."""

import re
import textwrap
from dataclasses import dataclass

from paths import ROOT

PAGES = [
    page for pattern in ("*.md", "docs/*.md", "docker/*.md", "recipes/*.md") for page in sorted(ROOT.glob(pattern))
]
# Other libraries, which are in .venv-integrations: tests/integrations/ runs what uses them.
ELSEWHERE = re.compile(r"\b(accelerate|transformers|lightning|torchtitan|torchft)\b")
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block. line: its number on the page, from 1."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def code_blocks():
    """Return all fenced blocks, in the order of the pages."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCED.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(CodeBlock(str(page.relative_to(ROOT)), line, match[2], textwrap.dedent(match[3])))
    return found


def python_blocks(horovod):
    """Return the blocks of Python that use Horovod, or those that do not; without those that use other libraries."""
    blocks = [block for block in code_blocks() if block.language == "python" and not ELSEWHERE.search(block.text)]
    return [block for block in blocks if ("hvd." in re.sub("#.*", "", block.text)) == horovod]
