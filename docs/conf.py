"""Sphinx: README.md, docs/*.md, notebooks and an API reference as a site. See docs/README.md.

The source folder is the repository's root, so links between pages, and from them to code, are the
same here as on a code host.
"""

import ast
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_origin

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import loopwright  # noqa: E402
from loopwright import registry, tasks, testing  # noqa: E402
from loopwright.configurables import table  # noqa: E402
from loopwright.graphs import aliases  # noqa: E402

project = "Loopwright"
release = importlib.metadata.version("loopwright")
root_doc = "README"
include_patterns = [
  *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/RESULTS.md"),
  "docs/**",
]
exclude_patterns = [".*", "**.ipynb_checkpoints", "build", "runs"]
extensions = [
  *("myst_nb", "sphinx_copybutton"),
  *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"),
]

html_theme = "furo"
html_title = f"Loopwright {release}"
html_show_copyright = html_show_sphinx = False
html_use_index = False
html_static_path = ["_static"]
html_css_files, html_js_files = ["site.css"], ["site.js"]
default_role = "py:obj"  # of `backticks` in docstrings
highlight_language = "text"
maximum_signature_line_length = 96
python_use_unqualified_type_names = True

myst_heading_anchors = 4
nb_execution_mode = "off"

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autoclass_content = "both"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
  name: f"loopwright.graphs.aliases.{name}" for name in (*aliases.__annotations__, "Tensor")
}
"""Signatures show these names, not what stands behind them, which is mostly `Any`."""
napoleon_custom_sections = [("Attributes", "params_style")]

_SAMPLES = ("diffusion", "gan", "vae", "wgan-gp")
"""Pictures that are no plots."""
_DESCRIBED = ("module", "class", "exception", "function", "method", "property")
_OWN = (
  *(f"{each.module}." for each in registry.entries(*registry.CONFIGURABLE)),
  *("loopwright.testing.", "loopwright.tasks."),
)
_log = logging.getLogger(__name__)


def setup(app: Sphinx) -> None:
  """Connects the functions below to Sphinx's events."""
  app.add_lexer("gin", PythonLexer)
  app.connect("source-read", add_navigation)
  app.connect("doctree-read", link_to_code, priority=400)  # before Sphinx copies the files
  app.connect("doctree-resolved", mark_plots)
  app.connect("autodoc-skip-member", skip_fields)
  app.connect("autodoc-before-process-signature", leave_types_alone)
  app.connect("autodoc-process-signature", name_types)
  app.connect("autodoc-process-docstring", require_docstring)
  app.connect("env-check-consistency", require_all_public_names)
  app.connect("html-collect-pages", code_pages)
  app.connect("html-page-context", make_accessible, priority=900)  # after the theme's
  app.connect("build-finished", add_index)


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
  """Gives the front page the sections of docs/README.md as its (hidden) table of contents."""
  if name != root_doc:
    return
  guides = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
  sections = re.findall(r"^(\w[^\n]*):\n\n((?:(?:- |  ).*\n)+)", guides, re.MULTILINE)
  found = {
    title: re.findall(r"\]\(([\w/-]+)\.(?:md|ipynb|rst)\)", text) for title, text in sections
  }
  listed = {page for pages in found.values() for page in pages}
  notebooks = [f"notebooks/{file.stem}" for file in (ROOT / "docs/notebooks").glob("*.ipynb")]
  found.setdefault("Notebooks", []).extend(sorted({*notebooks} - listed))
  source[0] += "".join(
    _contents(title, [f"docs/{page}" for page in pages]) for title, pages in found.items() if pages
  )
  source[0] += _contents(
    "About", ["docs/README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "benchmarks/RESULTS"]
  )
  decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
  source[0] += _contents("Decisions", [f"docs/decisions/{file.stem}" for file in decisions])


def _contents(caption: str, pages: Iterable[str]) -> str:
  return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def link_to_code(app: Sphinx, tree: nodes.document) -> None:
  """Turns links to files and folders that are no pages into links to `code_pages`."""
  name = app.env.docname
  app.env.code_pages = getattr(app.env, "code_pages", set())
  for link in [*tree.findall(addnodes.download_reference), *tree.findall(addnodes.pending_xref)]:
    path = os.path.normpath(os.path.join(os.path.dirname(name), link["reftarget"].lstrip("/")))
    if isinstance(link, addnodes.download_reference) or (ROOT / path).is_dir():
      app.env.code_pages |= {path, *_files(path)}
      target = app.builder.get_relative_uri(name, f"code/{path}")
      link.replace_self(nodes.reference("", "", *link.children, refuri=target, internal=True))


def mark_plots(app: Sphinx, tree: nodes.document, name: str) -> None:
  """Marks what is drawn on white, for _static/site.css; samples of images stay as they are."""
  del app, name
  for image in tree.findall(nodes.image):
    if Path(image["uri"]).stem not in _SAMPLES:
      image["classes"].append("plot")


def _files(path: str) -> list[str]:
  files = sorted(each for each in (ROOT / path).glob("*.*") if each.is_file())
  return [f"{path}/{each.name}" for each in files]


def code_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
  """Returns a page for each file that a page links to, highlighted, and for each folder."""
  for path in sorted(app.env.code_pages):
    body = _list(path) if (ROOT / path).is_dir() else _highlighted(path)
    title = path.replace("/", "/<wbr>")  # a phone breaks the line there
    yield f"code/{path}", {"title": path, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def _list(path: str) -> str:
  links = [f'<li><a href="{each}.html">{each}</a></li>' for each in _files(path)]
  return f"<ul>{''.join(links)}</ul>"


def _highlighted(path: str) -> str:
  text = (ROOT / path).read_text(encoding="utf-8")
  try:
    lexer = PythonLexer() if path.endswith(".gin") else get_lexer_for_filename(path)
  except ClassNotFound:
    lexer = TextLexer()
  return f'<div class="highlight">{highlight(text, lexer, HtmlFormatter())}</div>'


def make_accessible(
  app: Sphinx, name: str, template: str, context: dict[str, Any], tree: nodes.document | None
) -> None:
  """Mends what WCAG forbids, lists in signatures without terms; folds the sidebar into groups."""
  del app, name, template, tree
  context["furo_navigation_tree"] = _in_groups(context.get("furo_navigation_tree", ""))
  context["body"] = re.sub(
    r'<dl>\n((?:<dd><em class="sig-param">.*?</dd>\n)+)</dl>',
    lambda found: '<span class="lines">' + re.sub(r"(</?)dd>", r"\1span>", found[1]) + "</span>",
    context.get("body", ""),
    flags=re.DOTALL,
  )
  context["body"] = re.sub(
    r'(?<=<span class="pre">)[^<]+', lambda found: _breakable(found[0]), context["body"]
  )


def _in_groups(tree: str) -> str:
  """Returns the sidebar with a group to open for each caption; that of the page is open."""
  before, *parts = re.split(r'<p class="caption"[^>]*>', tree)
  shown = next((n for n, part in enumerate(parts) if "current" in part), 0)
  groups = []
  for number, part in enumerate(parts):
    caption, _, pages = part.partition("</p>")
    summary = f'<summary class="caption">{caption}</summary>'
    groups.append(f"<details{' open' if number == shown else ''}>{summary}{pages}</details>")
  return before + "".join(groups)


def _breakable(code: str) -> str:
  """Returns inline code whose long words a phone breaks after one of ./=( if at all."""
  place = r"(?<=\w[./=(])(?=[\w.])"
  return re.sub(r"[^\s<>]{21,}", lambda word: re.sub(place, "<wbr>", word[0]), code)


def skip_fields(
  app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
  """Skips fields and constants, which their class's docstring describes."""
  del app, what, options
  is_method = inspect.isroutine(value) and getattr(value, "__name__", "") == name
  return None if skip or is_method or isinstance(value, property) else True


def leave_types_alone(app: Sphinx, target: Any, bound_method: bool) -> None:
  """Takes from a signature what options declare beside their types; docs/options.md has it."""
  del app, bound_method
  annotations, known = getattr(target, "__annotations__", {}), getattr(target, "__globals__", {})
  for name, annotation in annotations.items():
    kind = known.get(annotation) if isinstance(annotation, str) else annotation
    if get_origin(kind) is Annotated:
      annotations[name] = kind.__origin__
    elif isinstance(annotation, str) and annotation.startswith("Annotated["):
      annotations[name] = ast.unparse(ast.parse(annotation).body[0].value.slice.elts[0])


def name_types(
  app: Sphinx, what: str, name: str, value: Any, options: Any, *signature: str | None
) -> tuple[str | None, ...]:
  """Replaces what autodoc makes of types inside others, and of defaults, by their names."""
  del app, what, name, value, options
  shown = r"TypeAliasForwardRef\('([\w.]+)'\)|<(?:function|class) '?(?:\w+\.)*(\w+)'?>"
  return tuple(part and re.sub(shown, lambda each: each[1] or each[2], part) for part in signature)


def require_docstring(
  app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
  """Warns, which fails the build, if a public name has no docstring."""
  del app, value, options
  if what in _DESCRIBED and not any(lines):
    _log.warning(f"{name} has no docstring; write one.")


def require_all_public_names(app: Sphinx, env: Any) -> None:
  """Warns, which fails the build, if the API reference lacks a public name."""
  del app
  listed = env.get_domain("py").objects
  for name in sorted({*public_names()} - {*listed}):
    _log.warning(f"{name} is public, but no page in docs/api/ has it; add it to one.")


def public_names() -> Iterator[str]:
  """Returns what a user imports, or names in a gin file."""
  exported = {name: getattr(loopwright, name) for name in loopwright.__all__}
  yield from (f"loopwright.{name}" for name in exported)
  for module in pkgutil.iter_modules(tasks.__path__, "loopwright.tasks."):
    importlib.import_module(module.name)
  table.register_all()
  registered = [entry.wrapped for _, entry in table.registry().items()]
  checks = [each for name, each in vars(testing).items() if not name.startswith("_")]
  for each in [*registered, *checks]:
    name = f"{getattr(each, '__module__', '')}.{getattr(each, '__name__', '')}"
    if name.startswith(_OWN) and not any(each is other for other in exported.values()):
      yield name


def add_index(app: Sphinx, failure: Exception | None) -> None:
  """Makes the front page index.html too, where web servers look for it."""
  if failure is None and app.builder.format == "html":
    shutil.copyfile(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))
