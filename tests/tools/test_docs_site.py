"""`make docs`: a website of all pages, with a reference of the public names, in which every link has a target."""

import os
import re
import shutil
import sys

import pytest

import commands
import gradzip
from gradzip.methods.base.registry import registered
from paths import ROOT

SCRIPT = "scripts/build_docs.sh"

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # it installs MkDocs


def build(root, site):
    return commands.run(root / SCRIPT, "--site-dir", site, env={**os.environ, "PYTHON": sys.executable}, timeout=500)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def headings(site, page):
    return set(re.findall(r'<h2 id="([\w.]+)"', (site / "api" / page).read_text()))


def test_site_has_every_page_of_the_repository(site):
    pages = [path.relative_to(ROOT) for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md"))]
    assert len(pages) > 15 and all((site / page).with_suffix(".html").exists() for page in pages)
    assert "<title>gradzip</title>" in (site / "index.html").read_text()
    assert (site / "recipes" / "index.html").exists() and (site / "docs" / "images" / "training.png").exists()


def test_reference_has_every_public_name(site):
    methods = {f"{method.__module__}.{method.__name__}" for method in registered().values()}
    assert headings(site, "methods.html") == methods
    modules = {name for name in gradzip.__all__ if isinstance(getattr(gradzip, name), type(gradzip))}
    assert {page.stem for page in (site / "api").glob("*.html")} == {"methods", "gradzip", *modules}
    rest = {name for name in gradzip.__all__ if name not in modules} - {m.__name__ for m in registered().values()}
    assert {name.rpartition(".")[2] for name in headings(site, "gradzip.html")} == rest
    named = {page: {name.rpartition(".")[2] for name in headings(site, f"{page}.html")} for page in modules}
    assert named["fsdp"] == set(gradzip.fsdp.__all__) and named["ops"] == set(gradzip.ops.__all__)
    assert {"merge", "shard"} <= named["checkpoint"] and {"register", "hook", "HookState"} == named["ddp"]
    assert all(named.values())


def test_lists_code_and_tables_are_read_as_on_github(site):
    usage = (site / "docs" / "usage.html").read_text()
    assert re.search(r"<li>(?:(?!</li>).)*A compressed warm-up(?:(?!</li>).)*<code>", usage, re.DOTALL)
    methods = (site / "docs" / "methods.html").read_text()
    assert "<code>BlockFloat(bits=8|4|2, block=256" in methods and r"\|" not in methods
    assert '<h2 id="nan-and-inf">' in usage, "anchors are those of GitHub"


CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the Debian package of that name has it")
# Chromium's own background requests are off; of those that remain, none is a page's.
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=20000",
]  # fmt: skip


def read_by_chromium(page, folder, *options):
    """A page as a browser shows it from its file, without a network: the HTML in the end, and the servers asked."""
    log = folder / "requests.json"
    offline = [f"--user-data-dir={folder / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}"]
    done = commands.run(CHROMIUM, *QUIET, *offline, *options, "--dump-dom", page, timeout=120)
    assert done.returncode == 0, done.stderr
    requests = set(re.findall(r'"url":"(https?://[^"/]+)', log.read_text()))
    return done.stdout, {host for host in requests if not re.search(r"(google|googleapis)\.com$", host)}


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_search_needs_no_server(site, tmp_path, dark):
    """From files, with nothing from elsewhere: the search finds pages, in the colours of the system."""
    page = f"{(site / 'index.html').as_uri()}?q=Hierarchical"
    html, asked = read_by_chromium(page, tmp_path, f"--blink-settings=preferredColorScheme={int(not dark)}")
    assert asked == set()
    assert int(re.search(r'md-search-result__meta">(\d+) matching documents<', html)[1]) > 3
    assert "<h1>Methods</h1>" in html and f'data-md-color-scheme="{"slate" if dark else "default"}"' in html


@needs_chromium
def test_pages_fit_a_phone(site, tmp_path):
    """Tables and code scroll by themselves: no page is wider than 390 pixels."""
    names = ["index", "docs/methods", "docs/benchmarks", "docs/accuracy", "docs/gpu", "api/ops"]
    tell = (
        "<script>addEventListener('load', () => parent.postMessage(document.documentElement.scrollWidth, '*'))</script>"
    )
    for name in names:
        page = site / f"{name}.html"
        page.with_suffix(".phone.html").write_text(page.read_text().replace("</body>", f"{tell}</body>"))
    show = "addEventListener('message', ({data}) => document.body.append(` ${data}`))"
    frames = "".join(f'<iframe width="390" height="844" src="{name}.phone.html"></iframe>' for name in names)
    (site / "phones.html").write_text(f"<body><script>{show}</script>{frames}</body>")
    html, _ = read_by_chromium((site / "phones.html").as_uri(), tmp_path)
    widths = re.sub("<.*?>", "", html, flags=re.DOTALL).split()[-len(names) :]
    assert len(widths) == len(names) and all(int(width) <= 390 for width in widths), widths


def test_a_broken_link_is_an_error(site, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "golden", "*.so"))
    (copy / "build").mkdir()
    (copy / "build" / "docs-tools").symlink_to(ROOT / "build" / "docs-tools")
    with (copy / "docs" / "links.md").open("a") as page:
        page.write("\n[no page](missing.md), [no section](usage.md#no-such-section)\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1
    assert "'missing.md', but the target 'docs/missing.md' is not found" in done.stderr
    assert "'docs/usage.md' does not contain an anchor '#no-such-section'" in done.stderr
    assert "Aborted with 2 warnings in strict mode!" in done.stdout
