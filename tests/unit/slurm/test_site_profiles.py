"""Site profiles: those that are shipped hold together, users add theirs, mistakes are named."""

from pathlib import Path

import pytest

from ringtap.core.errors import UsageError
from ringtap.slurm.site_profiles import Site, load_site, site_names
from ringtap.slurm.submission_request import parse_time_s

pytestmark = pytest.mark.shares

ALLIANCE = ("fir", "killarney", "narval", "nibi", "rorqual", "tamia", "trillium", "vulcan")


@pytest.mark.parametrize("name", ALLIANCE)
def test_a_shipped_profile_says_what_it_knows_and_from_where(name: str) -> None:
    site = load_site(name, {})
    assert site.name == name
    assert site.about
    assert site.fabric
    assert site.gpu_types
    assert site.modules[0] == "StdEnv/2023"
    assert "psutil" in site.wheelhouse
    assert "pyroute2" not in site.wheelhouse
    assert any(f"/wiki/{name}" in source.lower() for source in site.sources)
    doubts = {sentence.partition(":")[0] for sentence in site.unverified}
    assert doubts <= {*Site.__dataclass_fields__, "memory"}
    # what is left open is also said to be unverified
    for key in ("internet", "longest_job", "interface"):
        assert getattr(site, key) not in (None, "") or key in doubts
    if site.longest_job:
        assert parse_time_s(site.longest_job) >= 24 * 3600


def test_there_are_nine_sites() -> None:
    assert site_names({}) == sorted((*ALLIANCE, "generic"))


def test_the_cluster_one_is_on_is_the_default() -> None:
    assert load_site(None, {"CC_CLUSTER": "narval"}).name == "narval"
    assert load_site(None, {"CC_CLUSTER": "elsewhere"}).name == "generic"
    assert load_site(None, {}).name == "generic"
    assert load_site("Fir", {"CC_CLUSTER": "narval"}).name == "fir"


def test_users_add_profiles_and_build_on_others(tmp_path: Path) -> None:
    folder = tmp_path / "ringtap" / "sites"
    folder.mkdir(parents=True)
    (folder / "lab.toml").write_text('interface = "ens1"\n[[nodes]]\ncount = 4\ncores = 8\nmemory = "32G"\n')
    (folder / "narval.toml").write_text('base = "fir"\nabout = "mine"\nunverified = ["about: all of it"]\n')
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert site_names(environment)[:2] == ["lab", "narval"]
    assert load_site("lab", environment).interface == "ens1"
    own = load_site("narval", environment)
    assert (own.name, own.about, own.gpu_types) == ("narval", "mine", ("h100",))
    assert own.unverified[-1] == "about: all of it"
    assert len(own.unverified) == len(load_site("fir", {}).unverified) + 1
    assert load_site(str(folder / "lab.toml"), {}).nodes[0].cores == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("interfaces = 'x'", "there is no key 'interfaces': did you mean interface?"),
        ("interface = 3", "interface = 3 is not what this key takes"),
        ("internet = 'yes'", "internet = 'yes' is not what"),
        ("modules = [1]", r"modules = \[1\] is not what"),
        ("nodes = 4", "nodes is an array of tables"),
        ("[[nodes]]\ncount = 1\ncores = 2", "memory is missing"),
        ("[[nodes]]\ncount = true\ncores = 2\nmemory = '1G'", "count = True is not what"),
        ("base = 'nowhere'", "builds on 'nowhere', which is not a profile"),
        ("base = 'mine'", "builds on 'mine', which is not a profile"),
        ("= 1", "is not TOML"),
    ],
)
def test_a_mistake_in_a_profile_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text + "\n")
    with pytest.raises(UsageError, match=words):
        load_site(str(path), {})


def test_an_unknown_site_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="there is no site 'rorqal': did you mean rorqual"):
        load_site("rorqal", {})
    with pytest.raises(UsageError, match="one of fir, generic"):
        load_site("zzz", {})
    with pytest.raises(UsageError, match="there is no site 'alliance'"):
        load_site("alliance", {})
    with pytest.raises(UsageError, match="cannot be read"):
        load_site("missing.toml", {})


def test_the_table_in_the_documentation_is_that_of_the_profiles() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "sites.md").read_text()
    for name in ALLIANCE:
        site = load_site(name, {})
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        kinds = [kind for kind in site.nodes if kind.gpu]
        assert cells[1] == site.fabric
        assert [word.split("`")[1] for word in cells[2].split(";")] == [kind.gpu for kind in kinds]
        assert all(f"{max(kind.gpus)}, {kind.cores} cores" in cells[2] for kind in kinds)
        assert cells[3] == {True: "yes", False: "no", None: "?"}[site.internet]
        assert cells[4] == (site.longest_job or "?")
    for key in Site.__dataclass_fields__:
        assert f"`{key}`" in page or key in ("name", "nodes")


def test_the_profile_in_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "sites.md").read_text()
    (tmp_path / "own.toml").write_text(page.split("```\n")[1])
    site = load_site(str(tmp_path / "own.toml"), {})
    assert (site.name, site.interface, site.gpu_types) == ("own", "ib0", ("a100",))
