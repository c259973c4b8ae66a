"""What `make docs` adds to MkDocs: pages of the whole repository, and a reference of gradzip's public names.

Pages keep their paths, so that relative links lead to the same files on the site and in the repository. What they link
to besides pages, such as pictures and results, is copied. The reference is made of docstrings, without importing
gradzip: of what `__all__` and `@register` name.
"""

import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["*.md", "docs/*.md", "docker/*.md", "recipes/**/*.md", "benchmarks/results/*.md"]
LINK = re.compile(r"\]\(([^)\s#]+)")
CELL_BAR = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)
ADDED = ["docs/site.css", "docs/iframe-worker.js"]  # of mkdocs.yml
# Options of mkdocstrings for one object: without its members, and without its name.
ALONE = "\n    options: { members: false }"
TEXT = "\n    options: { members: false, show_root_heading: false, show_root_toc_entry: false }"


def on_config(config: MkDocsConfig) -> None:
    """Fill the parts of `nav` that name a folder with its pages."""
    pages = {"api/": [f"api/{name}.md" for name in reference()]}

    def filled(entry):
        if isinstance(entry, dict):
            return {title: filled(part) for title, part in entry.items()}
        if isinstance(entry, list):
            return [filled(part) for part in entry]
        if not entry.endswith("/"):
            return entry
        return pages.get(entry) or sorted(str(path.relative_to(ROOT)) for path in (ROOT / entry).glob("*.md"))

    config.nav = filled(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all pages, at their paths, what they link to, and the reference."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    linked = {(page.parent / target).resolve() for page in pages for target in LINK.findall(page.read_text())}
    others = {path for path in linked if path.is_file() and path.is_relative_to(ROOT)} - set(pages)
    for path in [*pages, *sorted(others), *(ROOT / name for name in ADDED)]:
        source = path.relative_to(ROOT).as_posix()
        files.append(File(source, str(ROOT), config.site_dir, config.use_directory_urls))
    for name, text in reference().items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    r"""Write `a\|b` in tables as `a|b`: in code, MkDocs shows the backslash, and GitHub needs it."""
    return CELL_BAR.sub(lambda match: match[0].replace(r"\|", "|"), markdown)


class Doctests(griffe.Extension):
    """Show the examples of docstrings, `>>> ...` up to an empty line, as code."""

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)


def reference() -> dict[str, str]:
    """The pages of the reference, by name: all methods, what else `gradzip` exports, and a page for each module."""
    package = griffe.load("gradzip", search_paths=[str(ROOT)], resolve_aliases=True)
    methods = {method.name: method.path for method in registered(package)}
    exported = {name: package[name] for name in public(package)}
    modules = [member for member in exported.values() if member.is_module]
    others = [member.path for name, member in exported.items() if not (member.is_module or name in methods)]
    pages = {
        "methods": page(
            "Methods", "Every method, as `gradzip.NAME`.", [methods[name] for name in sorted(methods)], ALONE
        ),
        "gradzip": page("gradzip", "What `gradzip` exports besides methods and modules.", others),
    }
    for module in modules:
        paths = [f"{module.path}.{name}" for name in public(module)]
        pages[module.name] = page(f"gradzip.{module.name}", f"::: {module.path}{TEXT}", paths)
    return pages


def page(title: str, about: str, paths: list[str], options: str = "") -> str:
    return "\n\n".join([f"# {title}", about, *(f"::: {path}{options}" for path in paths)]) + "\n"


def registered(module: griffe.Module) -> list[griffe.Class]:
    """The classes with the decorator `@register(...)`, in a module and those below it."""
    own = [
        found
        for found in module.classes.values()
        if not found.is_alias and any(str(decorator.value).startswith("register(") for decorator in found.decorators)
    ]
    below = [part for part in module.modules.values() if not part.is_alias]
    return [*own, *(method for part in below for method in registered(part))]


def public(module: griffe.Module) -> list[str]:
    """The names of `__all__` that are in the source; if it is computed, those of the module that `*` is imported from.

    Without `__all__`, the names of the functions and classes defined here.
    """
    members = (module.final_target if module.is_alias else module).members
    if module.exports:
        return sorted(str(name) for name in module.exports if str(name) in members)
    if module.exports is not None:
        starred = [alias for alias in members.values() if alias.is_alias and alias.wildcard_imported]
        return sorted(module.modules_collection[starred[0].target_path.rpartition(".")[0]].members)
    own = {name: member for name, member in members.items() if not name.startswith("_") and not member.is_alias}
    return [name for name, member in own.items() if member.is_function or member.is_class]
