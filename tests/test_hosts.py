"""Colab, Kaggle and everything else: where the token comes from, where a run goes. The hosts' own modules are stood in
for; what they hold here is what their documentation says of them.
"""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kit import hosts
from kit.errors import ArgumentError


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No token, and no host but this machine's."""
    monkeypatch.delenv("HF_TOKEN", raising=False)


def colab(monkeypatch, get, mounted=None):
    modules = {"google": {}, "google.colab": {}, "google.colab.userdata": {"get": get},
               "google.colab.drive": {"mount": lambda folder: mounted.append(folder)}}  # fmt: skip
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def kaggle(monkeypatch, get_secret):
    module = ModuleType("kaggle_secrets")
    module.UserSecretsClient = lambda: SimpleNamespace(get_secret=get_secret)
    monkeypatch.setitem(sys.modules, "kaggle_secrets", module)


def raising(name):
    def ask(_):
        raise type(name, (Exception,), {})("hf_secret")

    return ask


def test_without_a_token_nothing_is_set():
    assert hosts.host() == "Jupyter"
    assert hosts.hub_token() == "no HF_TOKEN; only gated models need one"
    assert "HF_TOKEN" not in os.environ


@pytest.mark.parametrize(("install", "name"), [(colab, "Colab"), (kaggle, "Kaggle")])
def test_a_hosts_secret_becomes_the_environments_and_is_not_told(monkeypatch, install, name):
    install(monkeypatch, lambda key: "hf_of_" + key)
    monkeypatch.setenv("HF_TOKEN", "")  # so that it is put back after the test
    assert hosts.host() == name
    assert hosts.hub_token() == f"HF_TOKEN from {name}'s secrets"
    assert os.environ["HF_TOKEN"] == "hf_of_HF_TOKEN"


@pytest.mark.parametrize("install", [colab, kaggle])
def test_the_environment_comes_first(monkeypatch, install):
    install(monkeypatch, lambda key: pytest.fail("the host was asked"))
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert hosts.hub_token() == "HF_TOKEN from the environment"
    assert os.environ["HF_TOKEN"] == "hf_mine"


@pytest.mark.parametrize(
    ("install", "error"), [(colab, "SecretNotFoundError"), (colab, "NotebookAccessError"), (kaggle, "BackendError")]
)
def test_a_secret_that_is_not_given_is_said_and_is_no_error(monkeypatch, install, error):
    install(monkeypatch, raising(error))
    said = hosts.hub_token()
    assert error in said and said.startswith("no HF_TOKEN") and "hf_secret" not in said


def test_an_empty_secret_counts_as_none(monkeypatch):
    colab(monkeypatch, lambda key: None)
    assert hosts.hub_token() == "no HF_TOKEN; only gated models need one"


def test_a_run_goes_to_drive_only_when_asked(monkeypatch):
    mounted = []
    colab(monkeypatch, lambda key: None, mounted)
    assert (hosts.place("runs/a"), mounted) == (Path("runs/a"), [])
    assert hosts.place("runs/a", drive=True) == Path("/content/drive/MyDrive/runs/a")
    assert mounted == ["/content/drive"]


def test_drive_outside_colab_is_refused():
    with pytest.raises(ArgumentError, match="no Google Drive outside Colab"):
        hosts.place("runs/a", drive=True)
