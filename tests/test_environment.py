"""Environments, built from wheels made here: no index is asked."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.errors import EnvironmentFailed, UsageError
from farhand.home import farhand_home
from farhand.sandbox.distributions import distribution_for
from farhand.sandbox.environment import BARE, DEFAULT, DEFAULT_MODULES, Environment, build, path_of, with_imports

ONE = Environment(("farhand-one==1.0",))


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the whole world."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": folder.as_uri(), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    wheel(
        folder, "farhand-one", {"one.py": "x = 1", "pack/__init__.py": "", "ns/deep/mod.py": "", "data/text.txt": "a"}
    )
    return folder


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    stem = name.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)


def entries(home: Path) -> Iterator[str]:
    yield from (path.name for path in (home / "environments").iterdir() if path.suffix != ".lock")


def test_the_hash_names_what_has_to_be_built() -> None:
    assert Environment(("a", "b")).hash == Environment(("b", "a")).hash == Environment(("a", "b"), network=True).hash
    hashes = {BARE.hash, ONE.hash, DEFAULT.hash, Environment(ONE.packages, python="/usr/bin/python3").hash}
    assert len(hashes) == 4


def test_a_build_installs_and_is_found_again(tmp_path: Path, index: Path) -> None:
    lines: list[str] = []
    built = build(ONE, tmp_path, lines.append)
    assert built.path == path_of(ONE, tmp_path)
    assert built.modules == ("ns", "one", "pack")
    assert (built.site / "one.py").read_text() == "x = 1"
    assert list(built.site.glob("__pycache__/one.*.pyc")), "a box cannot write the compiled file itself"
    assert any(line.startswith("Installing collected packages: farhand-one") for line in lines)
    shutil.rmtree(index)
    assert build(ONE, tmp_path, pytest.fail) == built


def test_a_bare_environment_needs_no_pip(tmp_path: Path) -> None:
    built = build(BARE, tmp_path, pytest.fail)
    assert built.modules == ()
    assert list(built.site.iterdir()) == []
    assert not built.mplconfig.exists()


def test_another_user_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        built = build(ONE, tmp_path)
    finally:
        os.umask(old)
    paths = [built.path, *built.path.rglob("*")]
    assert len(paths) > 8
    for path in paths:
        assert path.stat().st_mode & 0o044 == 0o044, path
        assert not stat.S_ISDIR(path.stat().st_mode) or path.stat().st_mode & 0o011 == 0o011, path


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="'farhand-none' could not be installed") as caught:
        build(Environment(("farhand-one", "farhand-none")), tmp_path)
    assert "No matching distribution found for farhand-none" in caught.value.message
    assert "Check the name" in caught.value.hint
    _, said, *errors = caught.value.message.splitlines()
    assert said == "pip said:"
    assert {line.partition(" ")[0] for line in errors} == {"ERROR:"}, "nothing of what went well"
    assert list(entries(tmp_path)) == [], "a failed build leaves nothing"


def test_code_of_a_package_does_not_run_on_this_side(tmp_path: Path, index: Path) -> None:
    source = tmp_path / "farhand_source-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup()\n")
    shutil.make_archive(str(index / "farhand_source-1.0"), "gztar", tmp_path, "farhand_source-1.0")
    with pytest.raises(EnvironmentFailed, match="farhand-source"):
        build(Environment(("farhand-source",)), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_a_dead_builder_left_is_cleared_away(tmp_path: Path) -> None:
    for name in (path_of(ONE, tmp_path), path_of(ONE, tmp_path).with_suffix(".partial")):
        (name / "site").mkdir(parents=True)
        (name / "environment.json").write_text("{")
    assert build(ONE, tmp_path).modules == ("ns", "one", "pack")
    assert list(entries(tmp_path)) == [ONE.hash]


def test_two_builders_build_once(tmp_path: Path) -> None:
    lines: list[str] = []
    builders = [threading.Thread(target=build, args=(ONE, tmp_path, lines.append)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert sum(line.startswith("Installing") for line in lines) == 1
    assert path_of(ONE, tmp_path).is_dir()


def test_the_default_environment_can_import_what_it_promises(home: Path) -> None:
    built = build(DEFAULT, home)
    assert set(built.modules) >= DEFAULT_MODULES
    assert built.path.resolve() == built.path


def test_the_font_cache_is_taken_as_it_is(home: Path, tmp_path: Path) -> None:
    built = build(DEFAULT, home)
    folder = tmp_path / "mplconfig"
    shutil.copytree(built.mplconfig, folder)
    (cache,) = folder.glob("fontlist-*.json")
    before = cache.stat().st_mtime_ns
    fonts = json.loads(cache.read_text())["ttflist"]
    assert fonts
    assert not [font["fname"] for font in fonts if os.path.isabs(font["fname"])], (
        "fonts of this machine are not in a box"
    )
    probe = "import sys; sys.path.append(sys.argv[1]); import matplotlib.font_manager as f; print(f.findfont('sans'))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", probe, str(built.site)],
        env={"MPLCONFIGDIR": str(folder), "PATH": os.environ["PATH"], "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "DejaVuSans" in done.stdout
    assert "building the font cache" not in done.stderr
    assert cache.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("name", "distribution"),
    [
        ("cv2", "opencv-python-headless"),
        ("sklearn.linear_model", "scikit-learn"),
        ("bs4", "beautifulsoup4"),
        ("yaml", "PyYAML"),
        ("google.cloud.storage.blob", "google-cloud-storage"),
        ("scipy.stats", "scipy"),
        ("some_thing", "some-thing"),
    ],
)
def test_import_names_lead_to_distributions(name: str, distribution: str) -> None:
    assert distribution_for(name) == distribution


def test_a_shared_namespace_names_no_distribution() -> None:
    with pytest.raises(UsageError, match="many share the name 'google'"):
        distribution_for("google.unheard.of")


def test_what_is_there_already_adds_nothing() -> None:
    names = ["json", "os.path", "xml.*", "numpy.linalg", "PIL.Image", "mpl_toolkits.mplot3d", "dateutil", "shown"]
    assert with_imports(DEFAULT, names, present=("shown",)) is DEFAULT
    assert with_imports(Environment(("scikit_learn>=1",)), ["sklearn.*"]).packages == ("scikit_learn>=1",)


def test_imports_add_distributions_once() -> None:
    more = with_imports(DEFAULT, ["sklearn", "sklearn.svm", " yaml ", "scipy.*"])
    assert more.packages == (*DEFAULT.packages, "scikit-learn", "PyYAML", "scipy")


@pytest.mark.parametrize("name", ["*", "a-b", "", "a..b", "--index-url=http://x", "a b", "x@http://y"])
def test_names_that_are_no_modules_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_imports(BARE, [name])
    assert name != "*" or "only the packages that were installed" in caught.value.message


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FARHAND_HOME", "~/a b/c")
    assert farhand_home() == tmp_path / "a b" / "c"
    assert stat.S_IMODE(farhand_home().stat().st_mode) == 0o700
    monkeypatch.setenv("FARHAND_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert farhand_home() == tmp_path / "data" / "farhand"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert farhand_home() == tmp_path / ".local" / "share" / "farhand"
