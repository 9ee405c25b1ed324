"""MkDocs hook: generates the reference pages from the code and adapts repository files for the site.

- Fills `<!-- generated: commands -->` with the output of `isqn COMMAND --help` for every command.
- Fills `<!-- generated: python -->` with the signatures and docstrings of the public names of `isqn`.
- Publishes CONTRIBUTING.md, CHANGELOG.md, results/, schemes.py and losses.py, which live outside docs/.
- Rewrites links to repository files to their pages, and drops those to files that the site does not have.
- Shows the picture of the schemes in a dark and in a narrow version, made from the one SVG file.
- Fails the build if a page would load anything from the network.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import posixpath
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html import escape, unescape
from pathlib import Path
from typing import Any, ForwardRef

ROOT = Path(__file__).parents[2]

COMMANDS = (
    "train dqn",
    "train stream-q",
    "train sac",
    "train cql",
    "train ilql",
    "resume",
    "study",
    "report",
    "eval",
    "play",
    "data collect",
    "data convert",
    "data inspect",
    "probe",
    "cost",
    "list",
    "doctor",
)

# Pages made from files outside docs/: path in the repository -> path in the site
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "results/README.md": "results/files.md",
    "src/isqn/schemes.py": "source/schemes.md",
    "src/isqn/losses.py": "source/losses.md",
}
# Other files outside docs/ that pages link to
REDIRECTS = {"README.md": "index.md", "results": "results/files.md", "examples": "extend.md"}
PICTURE = "images/schemes.svg"


# -- events of MkDocs


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        if source.endswith(".py"):
            text = f"---\nsearch:\n  exclude: true\n---\n\n# {Path(source).name}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    for path in sorted((ROOT / "results").iterdir()):
        if path.suffix != ".md":
            files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    picture = (ROOT / "docs" / PICTURE).read_text()
    for name, version in picture_versions(picture).items():
        files.append(File.generated(config, f"images/{name}", content=version))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    site_path = page.file.src_uri
    repository_path = next((path for path, name in PAGES.items() if name == site_path), f"docs/{site_path}")
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)  # links in code blocks stay
    parts[::2] = [keep_intervals(adapt_links(part, repository_path, site_path)) for part in parts[::2]]
    markdown = "".join(parts)
    if "<!-- generated: commands -->" in markdown:
        markdown = markdown.replace("<!-- generated: commands -->", command_reference())
    if "<!-- generated: python -->" in markdown:
        markdown = markdown.replace("<!-- generated: python -->", python_reference())
    return markdown


def on_post_build(config: Any) -> None:
    """Fail if a page or a style sheet would load anything from the network."""
    from mkdocs.exceptions import PluginError

    found = []
    for path in Path(config.site_dir).rglob("*.html"):
        found += [f"{path}: {tag}" for tag in remote_assets(path.read_text())]
    for path in Path(config.site_dir).rglob("*.css"):
        if re.search(r"""url\(["']?(https?:)?//|@import""", path.read_text()):
            found.append(str(path))
    if found:
        raise PluginError("These would be loaded from the network:\n" + "\n".join(found))


# -- links and pictures


def adapt_links(markdown: str, repository_path: str, site_path: str) -> str:
    """Point links at the pages of the site; turn images into links to their full size."""

    def adapt(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path), path))
        place = place_in_site(path)
        if place is None:
            return text
        link = posixpath.relpath(place, posixpath.dirname(site_path) or ".")
        if image and place == PICTURE:
            return scheme_picture(text, posixpath.dirname(link))
        if image:
            return f'[![{text}]({link})]({link} "Open the figure in full size")'
        return f"[{text}]({link}{'#' + anchor if anchor else ''})"

    return re.sub(r"(!?)\[((?:[^\[\]]|\[[^\]]*\](?!\())*)\]\(([^)\s]+)\)", adapt, markdown)


def keep_intervals(markdown: str) -> str:
    """Keep intervals such as [0.98, 1.02] on one line."""
    return re.sub(r"\[(-?[\d.]+), (-?[\d.]+)\]", "[\\1,\N{NO-BREAK SPACE}\\2]", markdown)


def place_in_site(path: str) -> str | None:
    """Return where a file of the repository is in the site; None if it is not there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES or path in REDIRECTS:
        return PAGES.get(path) or REDIRECTS[path]
    return path if path.startswith("results/") and "/" not in path.removeprefix("results/") else None


def picture_versions(picture: str) -> dict[str, str]:
    """Make the dark, the narrow and the narrow dark version of the picture of the schemes."""
    narrow = picture
    size = 'viewBox="0 0 1000 416" width="1000" height="416"'
    moves = {
        "target-based": (-6, 0),
        "target-free": (-6, 0),
        "iterated-shared": (-503, 364),
        "legend": (26, 364),
        "legend-frozen": (60, 364),
        "legend-target": (-370, 392),
        "legend-copy": (-728, 420),
    }
    if size not in picture or any(f'<g id="{name}">' not in picture for name in moves):
        raise ValueError(f"docs/{PICTURE} has lost its size or its groups; see picture_versions in {__file__}")
    narrow = narrow.replace(size, 'viewBox="0 0 526 830" width="526" height="830"')
    for name, (right, down) in moves.items():
        narrow = narrow.replace(f'<g id="{name}">', f'<g id="{name}" transform="translate({right} {down})">')
    return {
        "schemes-dark.svg": darken(picture),
        "schemes-narrow.svg": narrow,
        "schemes-narrow-dark.svg": darken(narrow),
    }


def darken(picture: str) -> str:
    colours = {
        "#ffffff": "#1e2129",
        "#c8c8c8": "#4a4f5c",
        "#111111": "#f2f2f2",
        "#222222": "#e0e0e0",
        "#333333": "#d0d0d0",
        "#444444": "#c8c8c8",
        "#777777": "#9a9a9a",
        "#eeeeee": "#3a3e48",
        "#d6e8f4": "#123a55",
        "#0072B2": "#56B4E9",
        "#D55E00": "#FF9447",
    }
    return re.sub("|".join(colours), lambda match: colours[match[0]], picture)


def scheme_picture(text: str, folder: str) -> str:
    text = escape(" ".join(text.split()))
    return "\n".join(
        f'<picture><source media="(max-width: 600px)" srcset="{folder}/schemes-narrow{dark}.svg">'
        f'<img src="{folder}/schemes{dark}.svg#only-{mode}" alt="{text}"></picture>'
        for mode, dark in (("light", ""), ("dark", "-dark"))
    )


def remote_assets(html: str) -> list[str]:
    """Return the tags of a page that load something from the network; plain links are not among them."""
    tags = re.findall(r"<(?:script|img|source|iframe|link|video|audio|object|embed)\b[^>]*>", html)
    return [tag for tag in tags if re.search(r"""(?:src|srcset|href|data)=["']?(?:https?:)?//""", tag)]


# -- reference pages


def run_help(command: str) -> str:
    paths = os.pathsep.join(path for path in (str(ROOT / "src"), *sys.path) if path)
    plain = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    plain["PYTHONIOENCODING"] = "ascii:xmlcharrefreplace"  # tyro draws boxes around its options in UTF-8
    environment = os.environ | plain | {"PYTHONPATH": paths}
    line = [sys.executable, "-m", "isqn", *command.split(), "--help"]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`isqn {command} --help` failed with code {done.returncode}: {done.stderr.strip()}")
    return unescape(done.stdout).strip()


def command_reference() -> str:
    with ThreadPoolExecutor(2) as pool:
        pages = pool.map(run_help, COMMANDS)
        return "\n\n".join(
            f"## isqn {command}\n\n{format_help(text)}" for command, text in zip(COMMANDS, pages, strict=True)
        )


def format_help(text: str) -> str:
    """Turn a help text into paragraphs and lists of options, by its indentation alone."""
    usage, _, rest = text.partition("\n\n")
    parts = [f"```text\n{usage}\n```"]
    paragraph: list[str] = []
    options: list[list[str]] = []  # name, description

    def flush() -> None:
        if paragraph:
            parts.append(" ".join(paragraph))
        if options:
            parts.append('<dl class="options">\n' + "\n".join(map(format_option, options)) + "\n</dl>")
        paragraph.clear()
        options.clear()

    after_blank = True
    for line in rest.splitlines():
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if words and not words.strip("-"):  # a rule under the title of a group of options
            title = options.pop()[0] if options else ""
            flush()
            parts.append(f"**{title[:1].upper()}{title[1:]}**")
        elif words and indent == 0:
            if options:
                flush()
            paragraph.append(words)
        elif words and (indent < 6 or not options):
            if paragraph:
                flush()
            columns = re.sub(r"\s{2,}", "\t", re.sub(r"\s+,", ",", words), count=1)
            name, _, description = columns.partition("\t")
            if options and not after_blank and not options[-1][1] and not name.startswith("-"):
                options[-1][0] += " " + name  # a long list of choices is broken into lines
            else:
                options.append([name, description])
        elif words:
            options[-1][1] += " " + words
        elif paragraph:
            flush()
        after_blank = not words
    flush()
    return "\n\n".join(parts)


def format_option(option: list[str]) -> str:
    name, description = (escape(text.strip(), quote=False) for text in option)
    description = re.sub(r"`([^`]+)`", r"<code>\1</code>", description)
    return f"<dt><code>{name}</code></dt>\n<dd>{description}</dd>"


class _Annotation:
    """Prints an annotation as it is in the code, without the quotes of a string."""

    def __init__(self, annotation: Any):
        if isinstance(annotation, ForwardRef):
            annotation = annotation.__forward_arg__
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self.text


def signature(name: str, call: Any) -> str:
    """Return the signature as code, one parameter a line if it is long."""
    found = inspect.signature(call)
    parameters = []
    for parameter in found.parameters.values():
        if parameter.annotation is not parameter.empty:
            parameter = parameter.replace(annotation=_Annotation(parameter.annotation))
        parameters.append(parameter)
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    returns = "" if found.return_annotation is found.empty else f" -> {_Annotation(found.return_annotation)}"
    words = [str(parameter) for parameter in parameters]
    first_named = [i for i, parameter in enumerate(parameters) if parameter.kind is parameter.KEYWORD_ONLY]
    if first_named and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        words.insert(first_named[0], "*")
    line = f"{name}({', '.join(words)}){returns}"
    return line if len(line) <= 88 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returns}"


def own_docstring(value: Any) -> str:
    text = inspect.getdoc(value) or ""
    automatic = isinstance(value, type) and dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}(")
    return "" if automatic else text


def python_reference() -> str:
    sys.path.insert(0, str(ROOT / "src"))
    try:
        import isqn

        names = [name for name in isqn.__all__ if not name.startswith("_")]
        return "\n\n".join(describe(name, getattr(isqn, name)) for name in names)
    finally:
        sys.path.remove(str(ROOT / "src"))


def describe(name: str, value: Any) -> str:
    lines = [f"## isqn.{name}"]
    if not callable(value):
        return "\n\n".join([*lines, f"```python\n{name} = {value!r}\n```"])
    if isinstance(value, type) and issubclass(value, BaseException):
        return "\n\n".join([*lines, own_docstring(value)])
    lines += [f"```python\n{signature(f'isqn.{name}', value)}\n```", own_docstring(value)]
    for attribute, member in vars(value).items() if isinstance(value, type) else ():
        if attribute.startswith("_") or not own_docstring(member):
            continue
        if isinstance(member, property):
            lines += [f"### {name}.{attribute}", own_docstring(member)]
        elif callable(member) or isinstance(member, classmethod | staticmethod):
            plain = getattr(member, "__func__", member)
            lines += [f"### {name}.{attribute}", f"```python\n{signature(f'{name}.{attribute}', plain)}\n```"]
            lines.append(own_docstring(plain))
    return "\n\n".join(line for line in lines if line)
