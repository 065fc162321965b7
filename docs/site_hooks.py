"""Hooks of `mkdocs build`: files of the repository that pages link to are part of the site.

A page names a result file or a source as `../benchmarks/results/x.json`. The site has a copy of each under
`repository/`, and the link leads there.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore[import-not-found]

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(\.\./([^)#\s]+)")
BESIDE = "repository/"


def linked_files() -> list[str]:
    """Return the files outside the pages' folder that pages link to, from the repository's root."""
    return sorted({name for page in ROOT.glob("docs/*.md") for name in LINK.findall(page.read_text(encoding="utf-8"))})


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files to the site; raises `FileNotFoundError` for one that is not there."""
    for name in linked_files():
        place = f"{BESIDE}{name}.txt" if name.endswith((".md", ".py")) else BESIDE + name
        files.append(File.generated(config, place, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to files of the repository to the site's copies; a bar in code needs no backslash in its tables."""
    markdown = CODE.sub(lambda hit: hit[0].replace(r"\|", "|"), markdown)
    plain = re.sub(r"(\]\(\.\./[^)#\s]+\.(?:md|py))(?=[)#])", r"\1.txt", markdown)
    return LINK.sub(lambda hit: f"]({BESIDE}{hit.group(1)}", plain)
