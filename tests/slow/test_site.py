"""The documentation site is built without a warning: every link, anchor and page of the navigation is there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site."""
    pytest.importorskip("mkdocs", reason="make test-all installs it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder], cwd=ROOT,
                          capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_readme_is_its_first_page(site):
    first = (site / "index.html").read_text(encoding="utf-8")
    assert "make quickstart" in first and 'src="images/quickstart.svg"' in first


def test_a_link_to_a_source_file_leads_to_its_text(site):
    page = (site / "security.html").read_text(encoding="utf-8")
    assert 'href="files/rlhf_ray/cluster/session.py.html"' in page
    assert ">ray_session<" in (site / "files/rlhf_ray/cluster/session.py.html").read_text(encoding="utf-8")


def test_named_blocks_of_code_have_their_name_as_title(site):
    assert '<span class="filename">ppo.py</span>' in (site / "guides/python.html").read_text(encoding="utf-8")


def test_the_python_api_shows_what_run_raises(site):
    page = (site / "python_api.html").read_text(encoding="utf-8")
    assert "RunInterrupted" in page and "newest checkpoint" in page
