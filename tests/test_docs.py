"""What is written about the product is true, complete, and builds into a site that asks nobody for anything."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from autotune.plan import make_plan
from autotune.spec import load_spec, parse_spec

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.mark.parametrize("script", ["write_study_reference.py", "write_reference.py"])
def test_a_reference_is_what_the_code_says(script: str) -> None:
    found = subprocess.run([sys.executable, f"scripts/{script}", "--check"], cwd=ROOT, check=False)
    assert found.returncode == 0, f"run scripts/{script}, or make docs"


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_is_a_study_that_could_start(path: Path) -> None:
    assert make_plan(load_spec(path), path.parent).tuning


def test_the_readme_opens_with_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [line.split("#")[0].strip() for line in readme.splitlines() if line.startswith("    make ")]
    assert commands[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("page", PAGES, ids=[path.stem for path in PAGES])
def test_a_page_names_only_files_that_exist(page: Path) -> None:
    tops = "autotune|benchmarks|docs|examples|ppas_core|reports|requirements|scripts|search_spaces|tests|traces"
    for name in re.findall(rf"`((?:{tops})/[\w./-]*)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_every_study_file_in_the_docs_is_one_that_the_code_takes() -> None:
    found = [
        yaml.safe_load(block)
        for page in PAGES
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ]
    assert found
    for keys in found:
        parse_spec({"name": "docs", **keys}, "docs")


def test_every_page_is_in_the_navigation() -> None:
    def files(part: object) -> Iterator[str]:
        if isinstance(part, str):
            yield part
        else:
            for inner in part.values() if isinstance(part, dict) else part:  # type: ignore[attr-defined]
                yield from files(inner)

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [str(path.relative_to(ROOT / "docs")) for path in PAGES[1:]]
    assert sorted(files(config["nav"])) == sorted(pages), "add the page to nav in mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a link to a page or heading that is not there, or a page without nav, ends the build."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("docs", "mkdocs.yml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    zensical = Path(sys.executable).with_name("zensical")
    built = subprocess.run(
        [zensical, "build", "--strict"], cwd=folder, check=False, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build/docs"


def test_a_link_to_nowhere_ends_the_build(site: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(site.parents[1], tmp_path / "broken", ignore=shutil.ignore_patterns("build", ".cache"))
    for link in ("nowhere.md", "start.md#nowhere"):
        (folder / "docs/index.md").write_text(f"# Home\n\n[broken]({link})\n")
        zensical = Path(sys.executable).with_name("zensical")
        built = subprocess.run([zensical, "build", "--strict"], cwd=folder, check=False, capture_output=True)
        assert built.returncode != 0, link


class _Page(HTMLParser):
    """What a built page loads, and the paragraphs that it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and values.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(values.get(LOADED[tag]) or "")
        if tag == "p":
            self.paragraphs.append("")
        self._open = tag == "p" or (self._open and tag in ("code", "em", "strong", "a"))

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.paragraphs[-1] += data


def test_lists_and_tables_are_drawn_as_such_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) == len(PAGES) - 1 + 1  # without the README, with the page for a wrong address
    for path in pages:
        page = _Page(path.read_text(encoding="utf-8"))
        assert not [text for text in page.paragraphs if re.search(r"^(?:[-*|]|\d+\.) ", text, re.MULTILINE)], path.name
        assert not [address for address in page.loads if re.match(r"(?:https?:)?//", address)], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), path.name


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; scripts/install_browser.sh installs one")
def test_the_site_opens_from_a_folder_finds_words_and_asks_nobody(site: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
    asked: list[str] = []
    errors: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.get_by_role("button", name="Search").first.click()
        page.locator("input:visible").first.fill("saturation")
        page.get_by_text("How far to trust it").wait_for(timeout=60_000)
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Tune your server").first.click()
        page.wait_for_url("**/tune-your-server.html")
        assert page.get_by_role("heading", level=1).inner_text().startswith("Tune your server")
        browser.close()
    assert asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert errors == []
