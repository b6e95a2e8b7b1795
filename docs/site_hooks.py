"""What the site needs beyond its pages: links that leave ``docs/``, roles in docstrings, options spelled out.

On GitHub a page links to the repository's files (``../examples/03_own_module.py``). The site has them as pages of their
own, so that it is whole wherever it lies. Notebooks become pages, with what their cells printed. Docstrings name other
objects as Sphinx's roles do; here they become links into the reference, where it has the object. Where ``**options``
stand, signatures show each option, and docstrings have what the class that declares it says of it. The reference of
observers follows from their registry.
"""

import json
import re
from importlib import import_module
from inspect import getdoc, signature
from operator import attrgetter
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from lightning_obs import CalibrationOptions, observers

#: a link that climbs: the dots, and the path behind them
CLIMBING = re.compile(r"\]\(((?:\.\./)+)([^)#]+)\)")
#: an entry of a docstring's sections: its name, and its text, whose further lines stand deeper
ENTRY = re.compile(r"^    (\*{0,2}\w+): .*(?:\n {5,}.*)*", re.MULTILINE)
#: where the site has files from outside of docs/
REPOSITORY = "repository/"
#: where they lie, and where the site has them
NOTEBOOKS = "examples/notebooks/"
PAGES_OF_NOTEBOOKS = "notebooks/"
#: where a page has an entry for each observer
OBSERVERS = "<!-- each class of the registry: docs/site_hooks.py -->"
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([\w.]+)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ to which a page in it links, and the notebooks."""
    root = Path(config.config_file_path).parent
    for notebook in sorted((root / NOTEBOOKS).glob("*.ipynb")):
        content = _page_of_notebook(notebook)
        files.append(File.generated(config, f"{PAGES_OF_NOTEBOOKS}{notebook.stem}.md", content=content))
    outside = set()
    for file in files.documentation_pages():
        for link in CLIMBING.finditer(file.content_string):
            if _leaves_docs(link, file.src_uri) and not link[2].endswith(".ipynb"):
                outside.add(link[2])
    for path in sorted(outside):
        source = root / path
        shown = f"# {path}\n\n````{source.suffix[1:]}\n{source.read_text()}\n````\n"
        text = f"---\nsearch: {{exclude: true}}\n---\n{shown}"
        files.append(File.generated(config, f"{REPOSITORY}{path}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs/ lead to these, and list the observers where the page asks for them."""
    if OBSERVERS in markdown:
        entries = [f"::: {path}\n    options: {{heading_level: 3}}" for path in observer_paths()]
        markdown = markdown.replace(OBSERVERS, "\n\n".join(entries))
    uri = page.file.src_uri
    if uri.startswith(REPOSITORY):
        return markdown

    def shown_on_the_site(link: re.Match[str]) -> str:
        if not _leaves_docs(link, uri):
            return link[0]
        path = Path(link[2])
        shown = f"{PAGES_OF_NOTEBOOKS}{path.stem}" if path.suffix == ".ipynb" else f"{REPOSITORY}{path}"
        return f"]({'../' * uri.count('/')}{shown}.md)"

    return CLIMBING.sub(shown_on_the_site, markdown)


def observer_paths() -> list[str]:
    """Where each built-in observer can be imported from, by name of the class; with the base classes for observers.

    A class that ``lightning_obs.observers`` exports is shown under that name, any other under its file's.
    """
    registry = observers.Observer
    classes = {registry.get_value_from_registry(name) for name in registry.registered_names()}
    paths = {}
    for observer_class in classes:
        if observer_class.__module__.startswith("lightning_obs."):
            paths[observer_class.__name__] = f"{observer_class.__module__}.{observer_class.__name__}"
    for name in observers.__all__:
        if name.endswith("Observer") and name != "Observer":
            paths[name] = f"lightning_obs.observers.{name}"
    return [paths[name] for name in sorted(paths)]


def _page_of_notebook(path: Path) -> str:
    """A notebook as Markdown: each piece of code with what it printed below it."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../../docs/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output["text"]) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed}```")
    title, *rest = parts
    return "\n\n".join([title, f"This is `{NOTEBOOKS}{path.name}`.", *rest])


def _leaves_docs(link: re.Match[str], uri: str) -> bool:
    """Whether a link of the page at this path below docs/ climbs out of docs/."""
    return link[1].count("../") > uri.count("/")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make a link of a role, or plain code where the reference does not have the object."""
    return ROLE.sub(_reference, html)


def _reference(role: re.Match[str]) -> str:
    path = role[1]
    return f'<autoref optional identifier="{path}"><code>{path.rsplit(".", 1)[-1]}</code></autoref>'


class OptionsSpelledOut(griffe.Extension):
    """Put the options, their defaults and their texts, where the source has ``**options: Unpack[...]``."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Take them from the function itself, in whose signature ``takes_keywords_of`` has put them."""
        *_, last = func.parameters or [None]
        if last is None or "Unpack[" not in str(last.annotation):
            return
        taker = attrgetter(func.path.removeprefix(f"{func.module.path}."))(import_module(func.module.path))
        options = {name: each for name, each in signature(taker).parameters.items() if name not in func.parameters}
        module, _, name = last.annotation.slice.canonical_path.rpartition(".")
        types = getattr(import_module(module), name).__annotations__
        if options:
            del func.parameters[last.name]
        for name, option in options.items():
            func.parameters[name] = griffe.Parameter(
                name,
                kind=griffe.ParameterKind.keyword_only,
                annotation=types[name].__forward_arg__,
                default=repr(option.default),
            )
        described = func.parent if func.name == "__init__" else func
        if described.docstring is not None:
            text = described.docstring.value
            entries = [entry[0] for entry in ENTRY.finditer(text) if entry[1] == "**options"]
            for entry in entries:
                owner = getattr(import_module(func.module.path), described.name)
                added = [_texts(owner)[name] for name in options]
                described.docstring.value = text.replace(entry, "\n".join([entry, *added]))


def _texts(owner: Any) -> dict[str, str]:
    """What a class, its bases and the options of a calibration say of their arguments, by name."""
    documented = [CalibrationOptions, *reversed(getattr(owner, "__mro__", ()))]
    return {entry[1]: entry[0] for each in documented for entry in ENTRY.finditer(getdoc(each) or "")}
